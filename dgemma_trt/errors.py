"""The one exception for what a user can mend."""


class UserError(Exception):
    """Bad input or a wish that cannot be met; the message names the file or field, what was found and what to do."""

"""The bundled nano checkpoint: a small trained DiffusionGemma, its tasks, tokenizer and training script."""

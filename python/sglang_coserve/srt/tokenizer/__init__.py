"""SGLang's tokenizer manager, which every request passes on its way to the scheduler."""

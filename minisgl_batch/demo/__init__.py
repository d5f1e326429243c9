"""The demo model: a tiny Qwen3 that this repository trained, and everything needed to train it again.

`words.py` and `data.py` generate instruction data, `tokenizer.py` builds the vocabulary, `train.py` trains, and
`model/` holds the result in Hugging Face format (`--model demo`). Nothing here is imported at run time.
"""

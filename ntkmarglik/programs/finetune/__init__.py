"""Transfer learning with a learned pull to the pretrained weights: the library of finetune.py."""

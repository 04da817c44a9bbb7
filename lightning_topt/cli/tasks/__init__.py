"""The models and data of `conf/`: ordinary LightningModules and DataModules.

They know nothing of lightning_topt's strategies; `_target_` entries in `conf/` name them.

    byte_lm         a GPT over bytes, and the standard library's source
    digits          a small convolutional net, and handwritten digits
    hugging_face    any architecture of transformers, and random inputs
"""

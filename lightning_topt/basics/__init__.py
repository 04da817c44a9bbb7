"""This folder holds what every other may import; nothing in it imports anything of this package,
nor torch.
"""

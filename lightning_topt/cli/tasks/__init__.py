"""The tasks of `conf/experiment`: ordinary LightningModules and DataModules that know nothing of
lightning_topt.
"""

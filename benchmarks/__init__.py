"""Measurements that developers repeat; each script says how.

A package, since the wheel of opacus brings one of this name: Python takes that of the folder that it is started in.
"""

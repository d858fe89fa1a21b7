"""How fast Postroom is, as ratios to its peers and to the servers alone, measured in one run.

make bench            # or: python -m bench --help
"""

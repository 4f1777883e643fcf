"""Files of commands as jobs, on this machine or a SLURM cluster, through submitit; see
`scripts/launch.py`.
"""

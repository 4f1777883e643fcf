"""Files of commands as jobs, here or on a SLURM cluster, by submitit; see `ntk-marglik launch`."""

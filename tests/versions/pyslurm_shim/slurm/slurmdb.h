#include_next <slurm/slurmdb.h>

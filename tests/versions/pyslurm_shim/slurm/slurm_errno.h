#include_next <slurm/slurm_errno.h>

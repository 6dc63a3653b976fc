#include_next <slurm/slurm_version.h>
#undef SLURM_VERSION_NUMBER
#define SLURM_VERSION_NUMBER 0x190b02

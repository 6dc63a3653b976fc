/* Lets PyPI's pyslurm, which is for Slurm 25.11, be built for 26.05, so that its side of the contract suite can be run on
 * a release that Debian has. A test vehicle: the pair for production is pyslurm with the Slurm it was made for. */
#ifndef FLASHREC_PYSLURM_SHIM_H
#define FLASHREC_PYSLURM_SHIM_H
#define SLURM_BACKWARD_COMPAT 1 /* 26.05's own wrappers for the calls that took a job id */
#include_next <slurm/slurm.h>
#include <string.h>

#define slurm_free_ctl_conf slurm_free_conf      /* its name in 26.05 */
#define ESLURM_ERROR_ON_DESC_TO_RECORD_COPY 2007 /* gone in 26.05; pyslurm only exports it */

extern void slurm_xfree_ptr(void *);

/* 26.05 returns memory of its own allocator, which pyslurm would give to free(). */
static inline char *shim_create_reservation(resv_desc_msg_t *message)
{
	char *name = slurm_create_reservation(message);
	char *copy = name ? strdup(name) : NULL;

	if (name)
		slurm_xfree_ptr(name);
	return copy;
}
#define slurm_create_reservation(message) shim_create_reservation(message)
#endif

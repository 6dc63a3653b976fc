/*
 * In slurmstepd, when a task of ours has ended: one datagram to the agent of this node, or none at
 * all.
 *
 * slurmstepd is root, and where to send is what the user's command line says. So: only an absolute
 * path, looked up with the user's rights and none of root's groups; only a socket that belongs to
 * the job's user, and to exactly the one that was looked at (it cannot be replaced in between);
 * nothing is created, opened for reading or waited for. Whatever goes wrong stays without effect.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/un.h>
#include <unistd.h>

#include "flashrec.h"

enum { MAX_DATAGRAM = 128, MAX_PATH = sizeof(((struct sockaddr_un *)NULL)->sun_path) };

/* The agent's socket from the command line of the job step; NULL: not one of ours. */
static const char *find_socket(spank_t spank)
{
	char **argv;
	int argc, end;

	if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS ||
	    !flashrec_is_launcher(argc, argv, &end))
		return NULL;
	for (int i = 0; i + 1 < end; i++)
		if (strcmp(argv[i], "--exit-socket") == 0)
			return argv[i + 1];
	return NULL;
}

/*
 * The path on this node: one command line serves all nodes of a step, so "%N" in the file name is
 * the NodeName. False if it does not fit into a socket address or the NodeName cannot be had.
 */
static bool expand(spank_t spank, const char *pattern, char path[MAX_PATH])
{
	const char *at = pattern, *name = strrchr(pattern, '/');
	char node[MAX_PATH] = "";
	size_t used = 0;

	while (*at && used < MAX_PATH) {
		bool is_node = name && at > name && at[0] == '%' && at[1] == 'N';
		const char *piece = is_node ? node : at;
		size_t length;

		if (is_node && !node[0] &&
		    spank_getenv(spank, "SLURMD_NODENAME", node, sizeof(node)) != ESPANK_SUCCESS)
			return false;
		length = is_node ? strlen(node) : 1;
		if (used + length >= MAX_PATH)
			return false;
		memcpy(path + used, piece, length);
		used += length;
		at += is_node ? 2 : 1;
	}
	path[used] = '\0';
	return path[0] == '/';
}

static int describe(spank_t spank, char text[MAX_DATAGRAM])
{
	uint32_t job, step, task;
	pid_t pid;
	int status;

	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_GLOBAL_ID, &task) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_PID, &pid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_EXIT_STATUS, &status) != ESPANK_SUCCESS)
		return -1;
	return snprintf(text, MAX_DATAGRAM, "FLASHREC1 task_exit %u %u %u %d %d\n", job, step, task,
			(int)pid, status);
}

/* A handle on the user's socket with nothing but its name in it, or -1. */
static int look_up(const char *path, uid_t user)
{
	struct stat found;
	int fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);

	if (fd >= 0 &&
	    (fstat(fd, &found) != 0 || !S_ISSOCK(found.st_mode) || found.st_uid != user)) {
		close(fd);
		return -1;
	}
	return fd;
}

static void send_to(int target, const char *text, size_t length)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return;
	snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d", target);
	(void)sendto(fd, text, length, MSG_DONTWAIT | MSG_NOSIGNAL,
		     (const struct sockaddr *)&address, sizeof(address));
	close(fd);
}

/*
 * The system call itself: glibc's setgroups changes all threads of a process, and slurmstepd has
 * others at work.
 */
static int set_groups(int count, const gid_t *groups)
{
	return (int)syscall(SYS_setgroups, (size_t)count, groups);
}

/*
 * The calling thread's rights over files alone are those of `user` and `group` while `path` is
 * looked up and used: with root's groups a user would learn what is in folders of theirs. If
 * slurmstepd is not root, it is the user already.
 */
static void send_as(uid_t user, gid_t group, const char *path, const char *text, size_t length)
{
	static gid_t groups[NGROUPS_MAX];
	int num_groups = getgroups(NGROUPS_MAX, groups);
	int user_before, group_before, target = -1;

	if (num_groups < 0 || (geteuid() == 0 && set_groups(0, groups) != 0))
		return;
	group_before = setfsgid(group);
	user_before = setfsuid(user);
	if ((uid_t)setfsuid(user) == user && (gid_t)setfsgid(group) == group)
		target = look_up(path, user);
	if (target >= 0) {
		send_to(target, text, length);
		close(target);
	}
	setfsuid((uid_t)user_before);
	setfsgid((gid_t)group_before);
	if (geteuid() == 0)
		(void)set_groups(num_groups, groups);
}

int flashrec_task_exit(spank_t spank)
{
	int saved = errno;
	char text[MAX_DATAGRAM];
	char path[MAX_PATH];
	const char *pattern = find_socket(spank);
	uid_t user;
	gid_t group;

	if (pattern && expand(spank, pattern, path) &&
	    spank_get_item(spank, S_JOB_UID, &user) == ESPANK_SUCCESS &&
	    spank_get_item(spank, S_JOB_GID, &group) == ESPANK_SUCCESS) {
		int length = describe(spank, text);

		if (length > 0 && length < MAX_DATAGRAM)
			send_as(user, group, path, text, (size_t)length);
	}
	errno = saved;
	return 0;
}

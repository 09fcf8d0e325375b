/*
 * What a batch script leaves running when it ends is ended before slurmstepd looks for it. That does the same, but
 * sleeps a second when a process has not died within microseconds, and slurmd's own looks get rarer meanwhile: a
 * requeue took 2.8 s instead of 0.1. The groups' own lists are read, for a process that is ending shows no group.
 */
#include "cadenza.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOUNT "/sys/fs/cgroup"
#define STEP "/step_batch"
#define TICK_US 2000
#define TICKS 100
#define MAX_LINE 4096
#define MAX_PATH (sizeof(MOUNT) + MAX_LINE + sizeof(STEP) + MAX_NAME)

/* Where a line of /proc/self/cgroup says that this step is; slurmstepd is in the job's group of the freezer itself. */
static bool step_of_line(char *line, char *folder, size_t size)
{
	char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL, *step;

	if (!path)
		return false;
	*path++ = '\0';
	path[strcspn(path, "\n")] = '\0';
	name++;
	step = strstr(path, STEP);
	if (step)
		*step = '\0';
	else if (strcmp(name, "freezer"))
		return false;
	snprintf(folder, size, MOUNT "%s%s%s" STEP, *name ? "/" : "", name, path);
	return !access(folder, F_OK);
}

static bool find_step(char *folder, size_t size)
{
	FILE *file = fopen("/proc/self/cgroup", "re");
	char line[MAX_LINE];
	bool found = false;

	while (file && !found && fgets(line, sizeof(line), file))
		found = step_of_line(line, folder, size);
	if (file)
		fclose(file);
	return found;
}

static bool is_slurms(pid_t pid)
{
	char path[64], name[32] = "";
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
	file = fopen(path, "re");
	if (file && !fgets(name, sizeof(name), file))
		*name = '\0';
	if (file)
		fclose(file);
	return !strncmp(name, "slurmstepd", 10);
}

/* Returns how many were there. */
static int end_listed(const char *folder)
{
	char path[MAX_PATH + 16];
	int pid, count = 0;
	FILE *file;

	snprintf(path, sizeof(path), "%s/cgroup.procs", folder);
	file = fopen(path, "re");
	while (file && fscanf(file, "%d", &pid) == 1) {
		if (pid <= 1 || is_slurms(pid))
			continue;
		kill(pid, SIGKILL);
		count++;
	}
	if (file)
		fclose(file);
	return count;
}

static int end_below(const char *folder)
{
	DIR *children = opendir(folder);
	const struct dirent *entry;
	char path[MAX_PATH];
	int count = end_listed(folder);

	while (children && (entry = readdir(children))) {
		if (entry->d_type != DT_DIR || *entry->d_name == '.')
			continue;
		if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name) < sizeof(path))
			count += end_below(path);
	}
	if (children)
		closedir(children);
	return count;
}

void leftover_end(void)
{
	char folder[MAX_PATH];

	if (!find_step(folder, sizeof(folder)))
		return;
	for (int tick = 0; tick < TICKS && end_below(folder) > 0; tick++)
		usleep(TICK_US);
}

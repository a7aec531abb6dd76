// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Lab stand-in for libcuda.so.1: as much of the CUDA driver API as a copy between two GPUs takes.
 *
 * Memory of a GPU is memory of the process. A copy inside one GPU is a copy. A copy to or from a
 * peer is done only when the GPU that executes it really reached the peer by its own DMA engine
 * (NV_P2P_TEST); else the destination stays as it was, and no error is told. That is what was seen
 * behind a translating IOMMU. Names, numbers and order of calls follow cuda.h of CUDA 12.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "nvidia-p2p-test.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_BLOCKS 1024

typedef int CUdevice;
typedef struct gpu *CUcontext;	/* primary contexts only: one for each GPU */
typedef struct gpu *CUstream;	/* a stream is its context's copy engine */
typedef unsigned long long CUdeviceptr;

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
	CUDA_ERROR_UNKNOWN = 999,
};

static const struct { int number; const char *name; } errors[] = {
	{ CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
	{ CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" },
	{ CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
	{ CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE" },
	{ CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE" },
	{ CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT" },
	{ CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM" },
	{ CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" },
	{ CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED" },
	{ CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN" },
};

struct gpu {
	char address[16];	/* 0000:41:00.0 */
	unsigned int minor;
	int node;		/* open while the context lives, else -1 */
	int retained;
	uint64_t peers;		/* bit N: access to device N is on */
};

struct block {
	char *memory;
	size_t size;
	struct gpu *gpu;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu gpus[MAX_GPUS];
static int count = -1;		/* before cuInit */
static struct block blocks[MAX_BLOCKS];
static __thread struct gpu *current;

/* ---- devices -------------------------------------------------------------------------------- */

static int open_node(unsigned int minor)
{
	char path[32];

	snprintf(path, sizeof(path), "/dev/nvidia%u", minor);
	return open(path, O_RDWR | O_CLOEXEC);
}

/* Opening a GPU's node starts it; one that does not start, or has no node here, is left out. */
static void add_gpu(const char *address, unsigned int minor)
{
	int node = open_node(minor);

	if (node < 0 || count == MAX_GPUS)
		return;
	close(node);
	snprintf(gpus[count].address, sizeof(gpus[count].address), "%.15s", address);
	gpus[count].minor = minor;
	gpus[count].node = -1;
	count++;
}

static int by_address(const void *one, const void *other)
{
	return strcmp(((const struct gpu *)one)->address, ((const struct gpu *)other)->address);
}

/* In a container too, the driver's folder in /proc shows all GPUs of the host. */
static void add_gpus(const char *folder)
{
	DIR *list = opendir(folder);
	struct dirent *entry;
	char path[512], line[256];
	unsigned int minor;
	FILE *file;

	while (list && (entry = readdir(list))) {
		snprintf(path, sizeof(path), "%s/%s/information", folder, entry->d_name);
		file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
		while (file && fgets(line, sizeof(line), file))
			if (sscanf(line, "Device Minor: %u", &minor) == 1)
				add_gpu(entry->d_name, minor);
		if (file)
			fclose(file);
	}
	if (list)
		closedir(list);
}

/* CUDA_VISIBLE_DEVICES: indices in bus order, up to the first that is none. */
static void choose(const char *text)
{
	struct gpu all[MAX_GPUS];
	int number = count;
	char *end;

	memcpy(all, gpus, sizeof(all));
	for (count = 0; count < number; count++, text = end + 1) {
		long index = strtol(text, &end, 10);

		if (end == text || index < 0 || index >= number)
			return;
		gpus[count] = all[index];
		if (*end != ',') {
			count++;
			return;
		}
	}
}

EXPORT int cuInit(unsigned int flags)
{
	const char *chosen = getenv("CUDA_VISIBLE_DEVICES");

	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	if (count < 0) {
		count = 0;
		add_gpus("/proc/driver/nvidia/gpus");
		qsort(gpus, count, sizeof(*gpus), by_address);
		if (chosen)
			choose(chosen);
	}
	pthread_mutex_unlock(&lock);
	return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
	*version = 13020;
	return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetCount(int *number)
{
	if (count < 0)
		return CUDA_ERROR_NOT_INITIALIZED;
	*number = count;
	return CUDA_SUCCESS;
}

EXPORT int cuDeviceGet(CUdevice *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
	if (device < 0 || device >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(text, size, "%s", gpus[device].address);
	return CUDA_SUCCESS;
}

/* Capability, not truth: the real one says yes behind a translating IOMMU, too. */
EXPORT int cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
	if (device < 0 || device >= count || peer < 0 || peer >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	*can = device != peer;
	return CUDA_SUCCESS;
}

/* ---- contexts ------------------------------------------------------------------------------- */

EXPORT int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	int rc = CUDA_SUCCESS;

	if (device < 0 || device >= count)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	if (!gpus[device].retained) {
		gpus[device].node = open_node(gpus[device].minor);
		gpus[device].peers = 0;
	}
	if (gpus[device].node < 0)
		rc = CUDA_ERROR_UNKNOWN;
	else
		gpus[device].retained++;
	pthread_mutex_unlock(&lock);
	*context = &gpus[device];
	return rc;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	if (device < 0 || device >= count || !gpus[device].retained)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&lock);
	if (!--gpus[device].retained) {
		close(gpus[device].node);
		gpus[device].node = -1;
	}
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

EXPORT int cuCtxSetCurrent(CUcontext context)
{
	current = context;
	return CUDA_SUCCESS;
}

EXPORT int cuCtxSynchronize(void)
{
	return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT int cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	uint64_t bit;

	if (!current || !peer || !peer->retained || peer == current || flags)
		return CUDA_ERROR_INVALID_CONTEXT;
	bit = 1ULL << (peer - gpus);
	if (current->peers & bit)
		return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	current->peers |= bit;
	return CUDA_SUCCESS;
}

EXPORT int cuCtxDisablePeerAccess(CUcontext peer)
{
	if (!current || !peer || !(current->peers & 1ULL << (peer - gpus)))
		return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	current->peers &= ~(1ULL << (peer - gpus));
	return CUDA_SUCCESS;
}

EXPORT int cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	*stream = current;
	return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT int cuStreamSynchronize(CUstream stream)
{
	return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT int cuStreamDestroy_v2(CUstream stream)
{
	return cuStreamSynchronize(stream);
}

/* ---- memory --------------------------------------------------------------------------------- */

static struct block *block_at(CUdeviceptr pointer, size_t size)
{
	char *memory = (char *)(uintptr_t)pointer;

	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].memory && memory >= blocks[i].memory &&
		    memory + size <= blocks[i].memory + blocks[i].size)
			return &blocks[i];
	return NULL;
}

EXPORT int cuMemAlloc_v2(CUdeviceptr *pointer, size_t size)
{
	int rc = CUDA_ERROR_OUT_OF_MEMORY;

	if (!current)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_BLOCKS && rc; i++) {
		if (blocks[i].memory)
			continue;
		blocks[i] = (struct block){ calloc(1, size), size, current };
		if (!blocks[i].memory)
			break;
		*pointer = (uintptr_t)blocks[i].memory;
		rc = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

EXPORT int cuMemFree_v2(CUdeviceptr pointer)
{
	struct block *block = block_at(pointer, 0);

	if (!block)
		return CUDA_ERROR_INVALID_VALUE;
	free(block->memory);
	block->memory = NULL;
	return CUDA_SUCCESS;
}

EXPORT int cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
	if (!block_at(to, size))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy((void *)(uintptr_t)to, from, size);
	return CUDA_SUCCESS;
}

EXPORT int cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
	if (!block_at(from, size))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(to, (void *)(uintptr_t)from, size);
	return CUDA_SUCCESS;
}

/* The GPU of the stream executes the copy: it writes into a peer, or reads from one. */
EXPORT int cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
	struct gpu *gpu = stream ? stream : current, *peer;
	struct block *target = block_at(to, size), *source = block_at(from, size);
	struct nv_p2p_test wanted;
	int right = 1;

	if (!gpu || !target || !source || (target->gpu != gpu && source->gpu != gpu))
		return CUDA_ERROR_INVALID_VALUE;
	if (target->gpu != source->gpu) {
		peer = target->gpu == gpu ? source->gpu : target->gpu;
		if (!(gpu->peers & 1ULL << (peer - gpus)))
			return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
		wanted = (struct nv_p2p_test){ peer->minor, target->gpu != gpu };
		right = ioctl(gpu->node, NV_P2P_TEST, &wanted);
		if (right < 0 && errno != EIO)	/* EIO: its DMA never ended */
			return CUDA_ERROR_OPERATING_SYSTEM;
	}
	if (right == 1)
		memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
	return CUDA_SUCCESS;
}

/* ---- errors --------------------------------------------------------------------------------- */

EXPORT int cuGetErrorName(int error, const char **name)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].number == error) {
			*name = errors[i].name;
			return CUDA_SUCCESS;
		}
	*name = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

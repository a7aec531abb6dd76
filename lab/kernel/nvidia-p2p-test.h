/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Lab only: what the stand-in for libcuda asks the stand-in for the driver, by ioctl on a GPU's node.
 * That GPU's own DMA engine moves four bytes between itself and the peer's BAR. The answer is 1 when
 * they were right at the other end, 0 when not. The real driver has nothing like it.
 */
#ifndef NVIDIA_P2P_TEST_H
#define NVIDIA_P2P_TEST_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct nv_p2p_test {
	__u32 minor;	/* of the peer: /dev/nvidiaN */
	__u32 write;	/* 1: into the peer (push), 0: from it (pull) */
};

#define NV_P2P_TEST _IOW('L', 1, struct nv_p2p_test)

#endif

/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef NVIDIA_LAB_H
#define NVIDIA_LAB_H

void nvidia_lab_attach(void);

#endif

// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Lab masquerade: QEMU "edu" devices read as NVIDIA RTX PRO 6000 Blackwell Server Edition.
 *
 * The device, its BAR, its DMA engine, its bus, NUMA node and IOMMU group are real (as QEMU
 * emulates them). Only the identity in configuration space is replaced: vendor and device,
 * class and revision, subsystem. The kernel reads that identity once when it enumerates a
 * device, so the devices are removed and found again after the replacement is in place. Load
 * this from the initramfs, before any driver could bind.
 *
 * A device at function 0 is a GPU, one at another function is the sound device of that card.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "lab-faults.h"

#define EDU_VENDOR	0x1234
#define EDU_DEVICE	0x11e8

#define GPU_ID		0x2bb510de	/* device, vendor */
#define GPU_CLASS	0x030200a1	/* 3D controller, revision a1 */
#define GPU_SUBSYSTEM	0x204e10de
#define AUDIO_ID	0x22e810de
#define AUDIO_CLASS	0x040300a1	/* HD audio controller */

LAB_FAULTS_PARAM(lab_all_ones, "whose configuration space reads all ones: off the bus");

static struct pci_ops *real_ops;
static struct pci_ops gpu_ops;

static bool is_edu(struct pci_bus *bus, unsigned int devfn)
{
	u32 id;

	return !real_ops->read(bus, devfn, PCI_VENDOR_ID, 4, &id) &&
	       id == (EDU_DEVICE << 16 | EDU_VENDOR);
}

static bool off_the_bus(struct pci_bus *bus, unsigned int devfn)
{
	return lab_faults_name(&lab_all_ones, lab_key(bus, devfn)) && is_edu(bus, devfn);
}

static int gpu_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	int rc = real_ops->read(bus, devfn, where, size, value);
	u32 word;

	if (rc)
		return rc;
	if (off_the_bus(bus, devfn)) {
		*value = ~0U >> (32 - size * 8);
		return 0;
	}
	switch (where & ~3) {
	case PCI_VENDOR_ID:
		word = PCI_FUNC(devfn) ? AUDIO_ID : GPU_ID;
		break;
	case PCI_CLASS_REVISION:
		word = PCI_FUNC(devfn) ? AUDIO_CLASS : GPU_CLASS;
		break;
	case PCI_SUBSYSTEM_VENDOR_ID:
		word = GPU_SUBSYSTEM;
		break;
	default:
		return 0;
	}
	if (!is_edu(bus, devfn))
		return 0;
	word >>= (where & 3) * 8;
	*value = size < 4 ? word & ((1U << (size * 8)) - 1) : word;
	return 0;
}

static int gpu_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	return off_the_bus(bus, devfn) ? 0 : real_ops->write(bus, devfn, where, size, value);
}

static struct pci_bus *root_of(struct pci_bus *bus)
{
	while (!pci_is_root_bus(bus))
		bus = bus->parent;
	return bus;
}

/*
 * A bus inherits its parent's operations when it is created. Replacing them on the root bus too
 * keeps the masquerade when somebody removes a root port and rescans.
 */
static void replace_ops(struct pci_bus *bus)
{
	if (bus->ops != &gpu_ops)
		pci_bus_set_ops(bus, &gpu_ops);
	if (root_of(bus)->ops != &gpu_ops)
		pci_bus_set_ops(root_of(bus), &gpu_ops);
}

/*
 * Under software emulation QEMU before 8.1 may misdirect a processor's access to its interrupt
 * controller while another processor changes the memory map; its timer then stays silent for good.
 * Finding devices anew changes the map some hundred times, so only one processor runs meanwhile.
 */
static void run_other_cpus(bool run)
{
	unsigned int cpu;

	for_each_present_cpu(cpu)
		if (cpu && (run ? add_cpu(cpu) : remove_cpu(cpu)))
			pr_warn("CPU %u does not go %sline\n", cpu, run ? "on" : "off");
}

static void find_anew(void)
{
	struct pci_dev *pdev;
	struct pci_bus *bus;
	int count = 0, number;

	while ((pdev = pci_get_device(EDU_VENDOR, EDU_DEVICE, NULL))) {
		pci_stop_and_remove_bus_device_locked(pdev);
		pci_dev_put(pdev);
		count++;
	}

	/* In the order of addresses: drivers see, and number, the GPUs in the order they appear. */
	pci_lock_rescan_remove();
	for (number = 0; number < 256; number++) {
		bus = pci_find_bus(0, number);
		if (bus && pci_is_root_bus(bus) && bus->ops == &gpu_ops)
			pci_rescan_bus(bus);
	}
	pci_unlock_rescan_remove();
	pr_info("%d edu devices stand in for GPUs\n", count);
}

static int __init lab_gpu_init(void)
{
	struct pci_dev *pdev = NULL;

	while ((pdev = pci_get_device(EDU_VENDOR, EDU_DEVICE, pdev))) {
		if (!real_ops) {
			real_ops = pdev->bus->ops;
			gpu_ops = *real_ops;
			gpu_ops.read = gpu_read;
			gpu_ops.write = gpu_write;
		}
		replace_ops(pdev->bus);
	}
	if (!real_ops) {
		pr_err("no edu device: this is not the lab's machine\n");
		return -ENODEV;
	}

	run_other_cpus(false);
	find_anew();
	run_other_cpus(true);
	return 0;
}
module_init(lab_gpu_init);

/* No exit: the kernel keeps using gpu_ops. */
MODULE_DESCRIPTION("Lab: show edu devices as NVIDIA GPUs");
MODULE_LICENSE("GPL");

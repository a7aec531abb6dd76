/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A module parameter that names PCI functions: "0000:41:00.0,0000:42:00.0", empty for none.
 * It can be written at any time; a word that is no address is refused with EINVAL.
 */
#ifndef LAB_FAULTS_H
#define LAB_FAULTS_H

#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#define LAB_FAULTS 16

/* Read without a lock, even where interrupts are off. No GPU has key 0, which means none. */
struct lab_faults {
	u32 keys[LAB_FAULTS];
};

static inline u32 lab_key(struct pci_bus *bus, unsigned int devfn)
{
	return pci_domain_nr(bus) << 16 | bus->number << 8 | devfn;
}

static inline bool lab_faults_name(const struct lab_faults *faults, u32 key)
{
	int i;

	for (i = 0; i < LAB_FAULTS; i++)
		if (READ_ONCE(faults->keys[i]) == key)
			return key != 0;
	return false;
}

static inline bool lab_faulty(const struct lab_faults *faults, struct pci_dev *pdev)
{
	return lab_faults_name(faults, lab_key(pdev->bus, pdev->devfn));
}

static int lab_faults_set(const char *text, const struct kernel_param *param)
{
	struct lab_faults *faults = param->arg;
	u32 keys[LAB_FAULTS] = {};
	unsigned int domain, bus, slot, function;
	int count = 0, length, i;

	for (;;) {
		text += strspn(text, ", \n");
		if (!*text)
			break;
		length = 0;
		if (count == LAB_FAULTS ||
		    sscanf(text, "%x:%x:%x.%x%n", &domain, &bus, &slot, &function, &length) != 4 ||
		    !length || domain > 0xffff || bus > 0xff || slot > 0x1f || function > 7)
			return -EINVAL;
		keys[count++] = domain << 16 | bus << 8 | PCI_DEVFN(slot, function);
		text += length;
	}
	for (i = 0; i < LAB_FAULTS; i++)
		WRITE_ONCE(faults->keys[i], keys[i]);
	return 0;
}

static int lab_faults_get(char *text, const struct kernel_param *param)
{
	const struct lab_faults *faults = param->arg;
	int i, size = 0;

	for (i = 0; i < LAB_FAULTS && faults->keys[i]; i++) {
		u32 key = faults->keys[i];

		size += scnprintf(text + size, PAGE_SIZE - size, "%s%04x:%02x:%02x.%x", i ? "," : "",
				  key >> 16, key >> 8 & 0xff, PCI_SLOT(key & 0xff),
				  PCI_FUNC(key & 0xff));
	}
	return size + scnprintf(text + size, PAGE_SIZE - size, "\n");
}

static const struct kernel_param_ops lab_faults_ops = {
	.set = lab_faults_set,
	.get = lab_faults_get,
};

#define LAB_FAULTS_PARAM(name, text)					\
	static struct lab_faults name;					\
	module_param_cb(name, &lab_faults_ops, &name, 0644);		\
	MODULE_PARM_DESC(name, "Lab: addresses of GPUs " text)

#endif

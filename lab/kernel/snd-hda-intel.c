// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Lab stand-in for the sound driver of a GPU's audio function: a second driver in the GPU's group
 * that uses the kernel's DMA interface and so keeps the group's type from changing. It has the
 * real one's name and comes before it in modprobe's order.
 */
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/pci.h>

#define AUDIO_CLASS	0x040300

static int audio_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int rc = pcim_enable_device(pdev);
	dma_addr_t address;

	if (rc)
		return rc;
	pci_set_master(pdev);
	rc = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (rc)
		return rc;
	if (!dmam_alloc_coherent(&pdev->dev, PAGE_SIZE, &address, GFP_KERNEL))
		return -ENOMEM;
	return 0;
}

static const struct pci_device_id audio_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = AUDIO_CLASS, .class_mask = ~0 },
	{ }
};
MODULE_DEVICE_TABLE(pci, audio_ids);

static struct pci_driver audio_driver = {
	.name = "snd_hda_intel",
	.id_table = audio_ids,
	.probe = audio_probe,
};
module_pci_driver(audio_driver);

MODULE_DESCRIPTION("Lab stand-in for the sound driver of GPUs");
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Lab stand-in for NVIDIA's kernel module: what a host administrator can see of it.
 *
 * Device numbers, /proc/driver/nvidia, use counts, the order of events and the NVRM lines follow
 * the open kernel module 595. Nothing computes. A GPU starts when its node is opened, as the real
 * one does; a GPU in an identity domain then fails in its FSP, and that state lives in the
 * "board" (a memory device of the virtual machine), so it lasts until the machine is powered off.
 */
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <generated/compile.h>

#include "lab-faults.h"
#include "nvidia-lab.h"
#include "nvidia-p2p-test.h"

#define NV_VERSION	"595.58.03"
#define NV_BANNER	"NVIDIA UNIX Open Kernel Module for x86_64  " NV_VERSION \
			"  Release Build  (lab)"
#define NV_MAJOR	195
#define NV_MINORS	248	/* 0..247 are GPUs */
#define NV_CTL_MINOR	255
#define NV_DMA_BITS	52

/* The board: one record per GPU that went wrong, in the memory of an ivshmem device. */
#define BOARD_VENDOR	0x1af4
#define BOARD_DEVICE	0x1110
#define BOARD_BAR	2
#define BOARD_RECORDS	64
#define BOARD_BYTES	(BOARD_RECORDS * 8)
#define FSP_ERROR	0x177

static bool fsp_fail_on_identity = true;
module_param(fsp_fail_on_identity, bool, 0644);
MODULE_PARM_DESC(fsp_fail_on_identity,
		 "Lab: a GPU that starts in an identity domain fails in its FSP until power-off");

LAB_FAULTS_PARAM(lab_remove_hangs, "whose remove never returns, whatever happens then");
LAB_FAULTS_PARAM(lab_use_count_leaked, "with one use more than processes have; remove waits for it");
LAB_FAULTS_PARAM(lab_probe_fails, "whose probe fails");

static unsigned int lab_remove_seconds;
module_param(lab_remove_seconds, uint, 0644);
MODULE_PARM_DESC(lab_remove_seconds, "Lab: how long each remove takes at least");

/* Options of the real module that this one shows in params; GpuInitOnProbe also works. */
static int NVreg_DmaRemapPeerMmio = 1;
module_param(NVreg_DmaRemapPeerMmio, int, 0444);
static int NVreg_EnableResizableBar;
module_param(NVreg_EnableResizableBar, int, 0444);
static int NVreg_GpuInitOnProbe;
module_param(NVreg_GpuInitOnProbe, int, 0444);
static int NVreg_DynamicPowerManagement = 3;
module_param(NVreg_DynamicPowerManagement, int, 0444);
static int NVreg_PreserveVideoMemoryAllocations;
module_param(NVreg_PreserveVideoMemoryAllocations, int, 0444);
static char *NVreg_RegistryDwords = "";
module_param(NVreg_RegistryDwords, charp, 0444);
static char *NVreg_RegistryDwordsPerDevice = "";
module_param(NVreg_RegistryDwordsPerDevice, charp, 0444);

struct nv_gpu {
	struct list_head list;
	struct pci_dev *pdev;
	struct proc_dir_entry *proc;
	unsigned int minor;
	unsigned int users;
	int instance;		/* while started, else -1 */
	bool removed;
	bool hangs;		/* remove never ends */
	bool known;		/* was started once: UUID and VBIOS are known */
	int p2p;		/* last answer of lab_p2p, -1 before */
};

/* Guards everything below, and each GPU's users and state. */
static DEFINE_MUTEX(nv_lock);
static LIST_HEAD(nv_gpus);
static DECLARE_BITMAP(nv_minors, NV_MINORS);
static DECLARE_BITMAP(nv_instances, NV_MINORS);
static unsigned int nv_called, nv_failed;	/* probes since load */

static struct pci_dev *board_pdev;
static u32 __iomem *board;
static u32 board_less[BOARD_RECORDS * 2];	/* a machine without the memory device */
static struct proc_dir_entry *proc_root, *proc_gpus;

/* ---- the board's memory ---------------------------------------------------------------- */

static u32 board_get(unsigned int word)
{
	return board ? readl(board + word) : board_less[word];
}

static void board_set(unsigned int word, u32 value)
{
	if (board)
		writel(value, board + word);
	else
		board_less[word] = value;
}

static u32 fsp_error(struct pci_dev *pdev)
{
	unsigned int i;

	for (i = 0; i < BOARD_RECORDS * 2; i += 2)
		if (board_get(i + 1) && board_get(i) == lab_key(pdev->bus, pdev->devfn))
			return board_get(i + 1);
	return 0;
}

static void fsp_break(struct pci_dev *pdev, u32 error)
{
	unsigned int i;

	for (i = 0; i < BOARD_RECORDS * 2 && board_get(i + 1); i += 2)
		;
	if (i < BOARD_RECORDS * 2) {
		board_set(i, lab_key(pdev->bus, pdev->devfn));
		board_set(i + 1, error);
	}
}

static int board_open(void)
{
	board_pdev = pci_get_device(BOARD_VENDOR, BOARD_DEVICE, NULL);
	if (!board_pdev)
		return 0;
	if (!pci_enable_device(board_pdev))
		board = pci_iomap(board_pdev, BOARD_BAR, BOARD_BYTES);
	if (board)
		return 0;
	pci_dev_put(board_pdev);
	return -ENOMEM;
}

static void board_close(void)
{
	if (board)
		pci_iounmap(board_pdev, board);
	pci_dev_put(board_pdev);
}

/* ---- starting and stopping a GPU --------------------------------------------------------- */

#define nv_err(gpu, fmt, ...) pr_err("NVRM: GPU%d " fmt "\n", (gpu)->instance, ##__VA_ARGS__)

static void fsp_report(struct nv_gpu *gpu, u32 error)
{
	struct pci_dev *pdev = gpu->pdev;
	dma_addr_t fmc;
	void *buffer = dma_alloc_coherent(&pdev->dev, SZ_64K, &fmc, GFP_KERNEL);
	int i;

	nv_err(gpu, "kfspProcessCommandResponse_GH100: FSP response reported error. Task ID: 0x1 Command type: 0x14 Error code: 0x%x",
	       error);
	nv_err(gpu, "kfspDumpDebugState_GB100: FSP microcode v4.17");
	nv_err(gpu, "kfspDumpDebugState_GB100: GPU %04x:%02x:%02x", pci_domain_nr(pdev->bus),
	       pdev->bus->number, PCI_SLOT(pdev->devfn));
	for (i = 0; i < 4; i++)
		nv_err(gpu, "kfspDumpDebugState_GB100: NV_PFSP_FALCON_COMMON_SCRATCH_GROUP_2(%d) = 0x%x",
		       i, i ? 0 : error);
	for (i = 0; i < 2; i++) {
		nv_err(gpu, "gpuHandleSanityCheckRegReadError_GH100: Possible bad register read: addr: 0x%x,  regvalue: 0xbadf4100,  error code: Unknown SYS_PRI_ERROR_CODE",
		       0x110040 + 4 * i);
		nv_err(gpu, "kfspDumpDebugState_GB100: NV_PGSP_FALCON_MAILBOX%d = 0xbadf4100", i);
	}
	nv_err(gpu, "kfspSendBootCommands_GH100: FSP boot cmds failed. RM cannot boot.");
	if (buffer) {
		/* The address the GPU was given: an IOVA, or a host physical one in identity */
		nv_err(gpu, "kfspDumpDebugState_GB100: Sent following content to FSP: ");
		nv_err(gpu, "kfspDumpDebugState_GB100: version=0x2, size=0x35c, gspFmcSysmemOffset=0x%llx",
		       (unsigned long long)fmc);
		dma_free_coherent(&pdev->dev, SZ_64K, buffer, fmc);
	}
	nv_err(gpu, "RmInitAdapter: Cannot initialize GSP firmware RM");
}

static int start_failed(struct nv_gpu *gpu, const char *code)
{
	pr_err("NVRM: GPU %s: RmInitAdapter failed! (%s)\n", pci_name(gpu->pdev), code);
	pr_err("NVRM: GPU %s: rm_init_adapter failed, device minor number %u\n",
	       pci_name(gpu->pdev), gpu->minor);
	gpu->instance = -1;
	return -EIO;
}

/* Boots one GPU. The caller holds nv_lock. -EIO when it does not come up. */
static int gpu_start(struct nv_gpu *gpu)
{
	struct pci_dev *pdev = gpu->pdev;
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);
	u32 error = fsp_error(pdev);

	if (!pci_device_is_present(pdev)) {
		pr_err("NVRM: Xid (PCI:%04x:%02x:%02x): 79, GPU has fallen off the bus.\n",
		       pci_domain_nr(pdev->bus), pdev->bus->number, PCI_SLOT(pdev->devfn));
		pr_err("NVRM: GPU %s: GPU has fallen off the bus.\n", pci_name(pdev));
		return start_failed(gpu, "0x22:0xf:667");
	}
	gpu->instance = find_first_zero_bit(nv_instances, NV_MINORS);
	if (!error && fsp_fail_on_identity && domain && domain->type == IOMMU_DOMAIN_IDENTITY) {
		error = FSP_ERROR;
		fsp_break(pdev, error);
	}
	if (error) {
		fsp_report(gpu, error);
		return start_failed(gpu, "0x62:0xffff:2168");
	}
	set_bit(gpu->instance, nv_instances);
	gpu->known = true;
	return 0;
}

static void gpu_stop(struct nv_gpu *gpu)
{
	clear_bit(gpu->instance, nv_instances);
	gpu->instance = -1;
}

/* ---- peer to peer test ----------------------------------------------------------------------- */

/* Registers of QEMU's edu device and its buffer (docs/specs/edu). */
#define EDU_IDENT	0x00
#define EDU_INVERTS	0x04	/* reads as the complement of what was written */
#define EDU_DMA_SRC	0x80
#define EDU_DMA_DST	0x88
#define EDU_DMA_COUNT	0x90
#define EDU_DMA_COMMAND	0x98
#define EDU_DMA_START	BIT(0)
#define EDU_DMA_TO_RAM	BIT(1)
#define EDU_BUFFER	0x40000
#define EDU_BAR_BYTES	0x100000

static bool edu_copy(void __iomem *bar, u64 from, u64 to, u64 direction)
{
	int tries;

	writeq(from, bar + EDU_DMA_SRC);
	writeq(to, bar + EDU_DMA_DST);
	writeq(sizeof(u32), bar + EDU_DMA_COUNT);
	writeq(EDU_DMA_START | direction, bar + EDU_DMA_COMMAND);
	for (tries = 0; tries < 400; tries++) {
		if (!(readq(bar + EDU_DMA_COMMAND) & EDU_DMA_START))
			return true;
		msleep(5);
	}
	return false;
}

/*
 * Moves four bytes by this device's own DMA engine from the first register of the peer's BAR, or
 * into its second, and looks with the CPU whether they were right: 1 or 0. The bus address is the
 * BAR's address, without an IOMMU mapping: what a GPU does with NVreg_DmaRemapPeerMmio=0.
 */
static int gpu_p2p(struct pci_dev *pdev, struct pci_dev *peer, bool write)
{
	void __iomem *own = pci_iomap(pdev, 0, EDU_BAR_BYTES);
	void __iomem *other = pci_iomap(peer, 0, EDU_BAR_BYTES);
	resource_size_t window = pci_resource_start(peer, 0);
	dma_addr_t address;
	u32 *memory = dma_alloc_coherent(&pdev->dev, PAGE_SIZE, &address, GFP_KERNEL);
	int rc = -ENOMEM;

	if (own && other && memory) {
		rc = -EIO;
		if (write) {
			*memory = lab_key(pdev->bus, pdev->devfn) ^ 0x5a5a5a5a;
			writel(0, other + EDU_INVERTS);
			if (edu_copy(own, address, EDU_BUFFER, 0) &&
			    edu_copy(own, EDU_BUFFER, window + EDU_INVERTS, EDU_DMA_TO_RAM))
				rc = readl(other + EDU_INVERTS) == ~*memory;
		} else {
			*memory = 0;
			if (edu_copy(own, window + EDU_IDENT, EDU_BUFFER, 0) &&
			    edu_copy(own, EDU_BUFFER, address, EDU_DMA_TO_RAM))
				rc = READ_ONCE(*memory) == readl(other + EDU_IDENT);
		}
	}
	if (memory)
		dma_free_coherent(&pdev->dev, PAGE_SIZE, memory, address);
	if (other)
		pci_iounmap(peer, other);
	if (own)
		pci_iounmap(pdev, own);
	return rc;
}

/* ---- device nodes -------------------------------------------------------------------------- */

static int nv_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct nv_gpu *gpu;
	int rc = -ENODEV;

	mutex_lock(&nv_lock);
	list_for_each_entry(gpu, &nv_gpus, list) {
		if (gpu->minor != minor || gpu->removed)
			continue;
		rc = gpu->users ? 0 : gpu_start(gpu);
		if (!rc) {
			gpu->users++;
			file->private_data = gpu;
		}
		break;
	}
	mutex_unlock(&nv_lock);
	return rc;
}

static int nv_release(struct inode *inode, struct file *file)
{
	struct nv_gpu *gpu = file->private_data;

	mutex_lock(&nv_lock);
	if (!--gpu->users)
		gpu_stop(gpu);
	mutex_unlock(&nv_lock);
	return 0;
}

static long nv_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct nv_gpu *gpu = file->private_data, *peer;
	struct nv_p2p_test wanted;
	int rc = -ENODEV;

	if (command != NV_P2P_TEST)
		return -ENOTTY;
	if (copy_from_user(&wanted, (void __user *)argument, sizeof(wanted)))
		return -EFAULT;
	mutex_lock(&nv_lock);
	list_for_each_entry(peer, &nv_gpus, list)
		if (peer->minor == wanted.minor && peer != gpu && !peer->removed)
			rc = gpu_p2p(gpu->pdev, peer->pdev, wanted.write);
	mutex_unlock(&nv_lock);
	return rc;
}

static const struct file_operations nv_fops = {
	.owner = THIS_MODULE,
	.open = nv_open,
	.release = nv_release,
	.unlocked_ioctl = nv_ioctl,
};

static const struct file_operations nv_ctl_fops = {
	.owner = THIS_MODULE,
};

static struct cdev nv_cdev, nv_ctl_cdev;

static int nodes_add(struct cdev *cdev, const struct file_operations *fops, unsigned int minor,
		     unsigned int count, const char *name)
{
	dev_t first = MKDEV(NV_MAJOR, minor);
	int rc = register_chrdev_region(first, count, name);

	if (rc)
		return rc;
	cdev_init(cdev, fops);
	cdev->owner = THIS_MODULE;
	rc = cdev_add(cdev, first, count);
	if (rc)
		unregister_chrdev_region(first, count);
	return rc;
}

static void nodes_remove(struct cdev *cdev)
{
	dev_t first = cdev->dev;
	unsigned int count = cdev->count;

	cdev_del(cdev);
	unregister_chrdev_region(first, count);
}

/* ---- /proc/driver/nvidia ------------------------------------------------------------------- */

static int version_show(struct seq_file *m, void *unused)
{
	seq_puts(m, "NVRM version: " NV_BANNER "\n");
	seq_puts(m, "GCC version:  " LINUX_COMPILER "\n");
	return 0;
}

static int params_show(struct seq_file *m, void *unused)
{
	seq_puts(m, "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: 1\n");
	seq_puts(m, "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n");
	seq_printf(m, "PreserveVideoMemoryAllocations: %d\n", NVreg_PreserveVideoMemoryAllocations);
	seq_printf(m, "EnableResizableBar: %d\n", NVreg_EnableResizableBar);
	seq_printf(m, "DynamicPowerManagement: %d\n", NVreg_DynamicPowerManagement);
	seq_puts(m, "EnableGpuFirmware: 18\nEnableGpuFirmwareLogs: 2\n");
	seq_puts(m, "OpenRmEnableUnsupportedGpus: 1\n");
	seq_printf(m, "DmaRemapPeerMmio: %d\n", NVreg_DmaRemapPeerMmio);
	seq_printf(m, "GpuInitOnProbe: %d\n", NVreg_GpuInitOnProbe);
	seq_printf(m, "RegistryDwords: \"%s\"\n", NVreg_RegistryDwords);
	seq_printf(m, "RegistryDwordsPerDevice: \"%s\"\n", NVreg_RegistryDwordsPerDevice);
	seq_puts(m, "RmMsg: \"\"\nGpuBlacklist: \"\"\nExcludedGpus: \"\"\n");
	return 0;
}

static int information_show(struct seq_file *m, void *unused)
{
	struct nv_gpu *gpu = m->private;
	struct pci_dev *pdev = gpu->pdev;
	u32 key = lab_key(pdev->bus, pdev->devfn);

	seq_puts(m, "Model: \t\t NVIDIA RTX PRO 6000 Blackwell Server Edition\n");
	seq_printf(m, "IRQ:   \t\t %u\n", pdev->irq);
	if (gpu->known)
		seq_printf(m, "GPU UUID: \t GPU-%08x-2bb5-204e-8000-%012x\n", key * 2654435761U, key);
	else
		seq_puts(m, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
	seq_printf(m, "Video BIOS: \t %s\n", gpu->known ? "98.02.81.00.07" : "??.??.??.??.??");
	seq_puts(m, "Bus Type: \t PCIe\n");
	seq_printf(m, "DMA Size: \t %u bits\n", NV_DMA_BITS);
	seq_printf(m, "DMA Mask: \t 0x%llx\n", DMA_BIT_MASK(NV_DMA_BITS));
	seq_printf(m, "Bus Location: \t %s\n", pci_name(pdev));
	seq_printf(m, "Device Minor: \t %u\n", gpu->minor);
	seq_printf(m, "GPU Firmware: \t %s\n", gpu->known ? NV_VERSION : "N/A");
	seq_puts(m, "GPU Excluded:\t No\n");
	return 0;
}

/* ---- lab_p2p in sysfs ---------------------------------------------------------------------- */

static ssize_t lab_p2p_show(struct device *dev, struct device_attribute *attr, char *text)
{
	struct nv_gpu *gpu = dev_get_drvdata(dev);

	return sysfs_emit(text, "%d\n", gpu->p2p);
}

static ssize_t lab_p2p_store(struct device *dev, struct device_attribute *attr, const char *text,
			     size_t size)
{
	struct nv_gpu *gpu = dev_get_drvdata(dev);
	unsigned int domain, bus, slot, function;
	struct pci_dev *peer;
	int rc;

	if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	peer = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	if (!peer)
		return -ENODEV;
	mutex_lock(&nv_lock);
	rc = gpu_p2p(to_pci_dev(dev), peer, false);
	if (rc >= 0)
		gpu->p2p = rc;
	mutex_unlock(&nv_lock);
	pci_dev_put(peer);
	return rc < 0 ? rc : size;
}
static DEVICE_ATTR_RW(lab_p2p);

static struct attribute *nv_attrs[] = { &dev_attr_lab_p2p.attr, NULL };
ATTRIBUTE_GROUPS(nv);

/* ---- PCI driver ------------------------------------------------------------------------------ */

static int nv_setup(struct nv_gpu *gpu)
{
	struct pci_dev *pdev = gpu->pdev;
	int rc;

	if (!pci_device_is_present(pdev)) {
		pr_err("NVRM: The NVIDIA GPU %s (PCI ID: %04x:%04x)\n"
		       "NVRM: installed in this system has fallen off the bus and is not responding to commands.\n",
		       pci_name(pdev), pdev->vendor, pdev->device);
		return -ENODEV;
	}
	rc = pci_enable_device(pdev);
	if (rc)
		return rc;
	pci_set_master(pdev);
	rc = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(NV_DMA_BITS));
	if (rc)
		goto disable;
	gpu->minor = find_first_zero_bit(nv_minors, NV_MINORS);
	if (lab_faulty(&lab_probe_fails, pdev)) {
		rc = start_failed(gpu, "0x22:0x56:894");
		goto disable;
	}
	if (NVreg_GpuInitOnProbe) {
		rc = gpu_start(gpu);
		if (rc)
			goto disable;
		gpu_stop(gpu);
	}
	set_bit(gpu->minor, nv_minors);
	gpu->proc = proc_mkdir(pci_name(pdev), proc_gpus);
	if (gpu->proc)
		proc_create_single_data("information", 0444, gpu->proc, information_show, gpu);
	list_add_tail(&gpu->list, &nv_gpus);
	return 0;

disable:
	pci_disable_device(pdev);
	return rc;
}

/* The real probe answers every failure with -1, which is EPERM to user space. */
static int nv_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct nv_gpu *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	int rc = -ENOMEM;

	mutex_lock(&nv_lock);
	nv_called++;
	if (gpu) {
		gpu->pdev = pdev;
		gpu->instance = -1;
		gpu->p2p = -1;
		pci_set_drvdata(pdev, gpu);
		rc = nv_setup(gpu);
	}
	if (rc)
		nv_failed++;
	mutex_unlock(&nv_lock);
	if (rc) {
		kfree(gpu);
		return -1;
	}
	return 0;
}

static bool in_use(struct nv_gpu *gpu)
{
	return gpu->users || gpu->hangs || lab_faulty(&lab_use_count_leaked, gpu->pdev);
}

static void nv_remove(struct pci_dev *pdev)
{
	struct nv_gpu *gpu = pci_get_drvdata(pdev);

	msleep(lab_remove_seconds * MSEC_PER_SEC);
	mutex_lock(&nv_lock);
	gpu->removed = true;
	gpu->hangs = lab_faulty(&lab_remove_hangs, pdev);
	if (in_use(gpu)) {
		pr_err("NVRM: Attempting to remove device %s with non-zero usage count!\n",
		       pci_name(pdev));
		while (in_use(gpu)) {
			mutex_unlock(&nv_lock);
			msleep(500);
			mutex_lock(&nv_lock);
		}
		pr_err("NVRM: Continuing with GPU removal for device %s\n", pci_name(pdev));
	}
	list_del(&gpu->list);
	clear_bit(gpu->minor, nv_minors);
	mutex_unlock(&nv_lock);
	proc_remove(gpu->proc);
	pci_disable_device(pdev);
	kfree(gpu);
}

static const struct pci_device_id nv_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID),
	  .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0 },
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID),
	  .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0 },
	{ }
};
MODULE_DEVICE_TABLE(pci, nv_ids);

static struct pci_driver nv_driver = {
	.name = "nvidia",
	.id_table = nv_ids,
	.probe = nv_probe,
	.remove = nv_remove,
	.dev_groups = nv_groups,
};

static unsigned int gpus_present(void)
{
	struct pci_dev *pdev = NULL;
	unsigned int count = 0;

	while ((pdev = pci_get_device(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, pdev)))
		if (pci_match_id(nv_ids, pdev))
			count++;
	return count;
}

/* -ENODEV when no GPU came to this driver: the real module does not stay loaded then. */
static int gpus_register(void)
{
	unsigned int present = gpus_present();
	int rc;

	if (!present) {
		pr_err("NVRM: No NVIDIA GPU found.\n");
		return -ENODEV;
	}
	rc = pci_register_driver(&nv_driver);
	if (rc)
		return rc;
	if (nv_called < present) {
		pr_warn("NVRM: The NVIDIA probe routine was not called for %u device(s).\n",
			present - nv_called);
		pr_warn("NVRM: This can occur when another driver was loaded and\n"
			"NVRM: obtained ownership of the NVIDIA device(s).\n");
	}
	if (nv_failed)
		pr_err("NVRM: The NVIDIA probe routine failed for %u device(s).\n", nv_failed);
	if (nv_called > nv_failed)
		return 0;
	pr_err("NVRM: %s\n", nv_called ? "None of the NVIDIA devices were initialized." :
					 "No NVIDIA devices probed.");
	pci_unregister_driver(&nv_driver);
	return -ENODEV;
}

/* nvidia-uvm needs this module, as the real one does: it can't be removed below it. */
void nvidia_lab_attach(void)
{
}
EXPORT_SYMBOL_GPL(nvidia_lab_attach);

static int __init nv_init(void)
{
	int rc = board_open();

	if (rc)
		return rc;
	rc = -ENOMEM;
	proc_root = proc_mkdir("driver/nvidia", NULL);
	proc_gpus = proc_mkdir("driver/nvidia/gpus", NULL);
	if (!proc_root || !proc_gpus)
		goto no_proc;
	proc_create_single("version", 0444, proc_root, version_show);
	proc_create_single("params", 0444, proc_root, params_show);
	rc = nodes_add(&nv_cdev, &nv_fops, 0, NV_MINORS, "nvidia");
	if (rc)
		goto no_proc;
	rc = nodes_add(&nv_ctl_cdev, &nv_ctl_fops, NV_CTL_MINOR, 1, "nvidiactl");
	if (rc)
		goto no_control;
	rc = gpus_register();
	if (rc)
		goto no_gpus;
	pr_info("NVRM: loading " NV_BANNER "\n");
	return 0;

no_gpus:
	nodes_remove(&nv_ctl_cdev);
no_control:
	nodes_remove(&nv_cdev);
no_proc:
	proc_remove(proc_root);
	board_close();
	return rc;
}
module_init(nv_init);

static void __exit nv_exit(void)
{
	pci_unregister_driver(&nv_driver);
	nodes_remove(&nv_ctl_cdev);
	nodes_remove(&nv_cdev);
	proc_remove(proc_root);
	board_close();
}
module_exit(nv_exit);

MODULE_DESCRIPTION("Lab stand-in for the NVIDIA kernel module");
MODULE_VERSION(NV_VERSION);
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0-or-later
/* Lab stand-in for nvidia-uvm: two nodes under a dynamic major that can be held open. */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia-lab.h"

#define UVM_MINORS 2	/* nvidia-uvm, nvidia-uvm-tools */

static const struct file_operations uvm_fops = {
	.owner = THIS_MODULE,
};

static struct cdev uvm_cdev;
static dev_t uvm_first;

static int __init uvm_init(void)
{
	int rc = alloc_chrdev_region(&uvm_first, 0, UVM_MINORS, "nvidia-uvm");

	if (rc)
		return rc;
	nvidia_lab_attach();
	cdev_init(&uvm_cdev, &uvm_fops);
	uvm_cdev.owner = THIS_MODULE;
	rc = cdev_add(&uvm_cdev, uvm_first, UVM_MINORS);
	if (rc) {
		unregister_chrdev_region(uvm_first, UVM_MINORS);
		return rc;
	}
	pr_info("nvidia-uvm: Loaded the UVM driver, major device number %d.\n", MAJOR(uvm_first));
	return 0;
}
module_init(uvm_init);

static void __exit uvm_exit(void)
{
	cdev_del(&uvm_cdev);
	unregister_chrdev_region(uvm_first, UVM_MINORS);
	pr_info("nvidia-uvm: Unloaded the UVM driver.\n");
}
module_exit(uvm_exit);

MODULE_DESCRIPTION("Lab stand-in for the NVIDIA unified memory module");
MODULE_LICENSE("GPL");

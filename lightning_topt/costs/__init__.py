"""OpGraph and Cluster to tables: what every configuration of every block costs.

In seconds and bytes. The way through this folder:

    the machines    cluster, accuracy; measured by calibrate (with measuring), kept by measurements
    one operator    compute (kernels), communication (collectives, compressed exchanges)
    one step        training_step, with segments, lifetimes, sizes, optimizer and
                    reserved_memory (CUDA)
    the search      chain_table (of a step, of stages)
"""

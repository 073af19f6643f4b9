"""What GPU backends share beside kernels: host memory that a device reads, tables in it, chains on a side stream.

Nothing here names a vendor: a backend passes its runtime library and its measured tuning. Importing a module of this
package imports Triton; ``engram_core`` itself never does.
"""

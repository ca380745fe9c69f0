"""A stand-in accelerator: what can go wrong on a device, found on CPUs.

Device type "standin": host memory and the CPU's kernels, with streams, events, an allocator that
counts and a process group whose waits do not block the host, as NCCL's. It tells of

- tensors on the wrong device (an error, as on CUDA),
- races: two streams touch the same bytes and neither waits for the other,
- host waits: synchronise, `.item()`, pageable copies, with the place in the code,
- memory: allocated and peak bytes,
- collectives that ranks of one communicator do not call alike.

It cannot tell of kernels that compete for multiprocessors, and it knows no kernels but the CPU's.
"""

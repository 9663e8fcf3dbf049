"""The runtime: carries out a `CompiledProgram` on the ranks of a process group. It decides nothing.

`launch.launch` is the door. `ranks` knows the process groups, `collectives` the communication inside a stage, `stage`
one rank's part of the network, `pipeline` the order of its work, `data_parallel` the gradients over dp, `state` the
way between local slices and the user's full tensors.
"""

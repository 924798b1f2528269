"""A filter of system calls for processes behind a wall: what reaches beyond their namespaces, or what no limit counts.

The kernel runs the filter (seccomp) before each call of the process and of all that it starts. A refused call fails
with EPERM; any other is left alone. The filter is a program for the classic Berkeley Packet Filter: instructions of a
code, two relative jumps and a number, over the record of a call (`struct seccomp_data`). A relative jump says how many
instructions it passes over: 0 goes on with the next one.
"""

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Architecture(NamedTuple):
    """How the kernel knows a kind of processor, and its numbers of system calls."""

    audit_number: int
    calls: Mapping[str, int]


KEYRING = ("add_key", "request_key", "keyctl")
"""Calls that read and write the keys of the session, such as those of a login: a namespace does not hide them."""
UNCOUNTED = ("shmget", "shmat", "msgget", "msgsnd", "semget", "memfd_secret", "io_uring_setup")
"""Calls that take memory of the kernel, which no limit of the process counts."""
MOUNTING = ("mount", "fsopen", "fsmount", "move_mount", "open_tree", "unshare", "setns")
"""Calls by which a process makes namespaces and file systems of its own, with memory that no limit counts."""
KERNEL = ("bpf", "perf_event_open", "userfaultfd", "ptrace", "kexec_load", "init_module", "finit_module")
"""Calls that programs of the kernel answer, which a tool does not need."""
REFUSED = (*KEYRING, *UNCOUNTED, *MOUNTING, *KERNEL)

X86_64 = {
    "shmget": 29,
    "shmat": 30,
    "semget": 64,
    "msgget": 68,
    "msgsnd": 69,
    "ptrace": 101,
    "mount": 165,
    "init_module": 175,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "setns": 308,
    "finit_module": 313,
    "bpf": 321,
    "userfaultfd": 323,
}
AARCH64 = {
    "mount": 40,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "ptrace": 117,
    "msgget": 186,
    "msgsnd": 189,
    "semget": 190,
    "shmget": 194,
    "shmat": 196,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "perf_event_open": 241,
    "setns": 268,
    "finit_module": 273,
    "bpf": 280,
    "userfaultfd": 282,
}
NEW_CALLS = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsmount": 432,
    "memfd_secret": 447,
}
"""Calls that have one number on all kinds of processors."""
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, X86_64 | NEW_CALLS),
    "aarch64": Architecture(0xC00000B7, AARCH64 | NEW_CALLS),
}
"""The kinds of processors that the filter knows, by what `platform.machine` says."""
NUMBERS_OF_X32 = 0x40000000
"""From here on are numbers of x86-64's calls with short pointers, which would name refused ones anew."""

LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
RETURN = 0x06
OFFSET_OF_NUMBER = 0  # of the system call's number in `struct seccomp_data`, in bytes
OFFSET_OF_ARCHITECTURE = 4
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM  # the call fails with "operation not permitted"


def build_refusing_filter(machine: str = "", names: Sequence[str] = REFUSED) -> bytes | None:
    """Return a seccomp filter, a program for the kernel, that refuses these system calls and allows all others.

    machine: the kind of processor as `platform.machine` names it; empty for this one. Returns None for a kind that is
    not in ARCHITECTURES.

    For the calls 101 and 165 the program is, an instruction a line:

        load the kind of processor of the call
        if it is another kind than `machine`: go to REFUSE
        load the number of the call
        if it is NUMBERS_OF_X32 or more: go to REFUSE
        if it is 101: go to REFUSE
        if it is 165: go to REFUSE
        return ALLOW
        return REFUSE
    """
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    numbers = sorted(architecture.calls[name] for name in names)
    refuse_index = len(numbers) + 5  # four instructions, one for each number, and ALLOW stand before REFUSE

    def to_refuse(index: int) -> int:
        """Return the length of a jump from the instruction `index` to REFUSE: how many instructions it passes over."""
        return refuse_index - index - 1

    program = [
        _encode_instruction(LOAD, OFFSET_OF_ARCHITECTURE),
        _encode_instruction(JUMP_IF_EQUAL, architecture.audit_number, if_false=to_refuse(index=1)),
        _encode_instruction(LOAD, OFFSET_OF_NUMBER),
        _encode_instruction(JUMP_IF_AT_LEAST, NUMBERS_OF_X32, if_true=to_refuse(index=3)),
    ]
    for index, number in enumerate(numbers, start=len(program)):
        program.append(_encode_instruction(JUMP_IF_EQUAL, number, if_true=to_refuse(index)))
    program.append(_encode_instruction(RETURN, ALLOW))
    program.append(_encode_instruction(RETURN, REFUSE))
    return b"".join(program)


def _encode_instruction(code: int, number: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return the eight bytes of an instruction of a filter.

    - code: what it does, such as JUMP_IF_EQUAL.
    - number: what it loads, compares with or returns.
    - if_true, if_false: how many instructions a jump passes over if its comparison holds, and if it does not.
    """
    return struct.pack("=HBBI", code, if_true, if_false, number)

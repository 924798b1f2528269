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
    """A kind of processor as the kernel knows it.

    Attributes:
        audit_number: The number of this kind of processor.
        number_by_call: The numbers of the system calls on such processors, by the names of the calls.
    """

    audit_number: int
    number_by_call: Mapping[str, int]


KEYRING_CALLS = ("add_key", "request_key", "keyctl")
"""Calls that read and write the keys of the session, such as those of a login: a namespace does not hide them."""
UNCOUNTED_MEMORY_CALLS = ("shmget", "shmat", "msgget", "msgsnd", "semget", "memfd_secret", "io_uring_setup")
"""Calls that take memory of the kernel, which no limit of the process counts."""
NAMESPACE_CALLS = ("mount", "fsopen", "fsmount", "move_mount", "open_tree", "unshare", "setns")
"""Calls by which a process makes namespaces and file systems of its own, with memory that no limit counts."""
KERNEL_PROGRAM_CALLS = ("bpf", "perf_event_open", "userfaultfd", "ptrace", "kexec_load", "init_module", "finit_module")
"""Calls that programs of the kernel answer, which a tool does not need."""
REFUSED_CALLS = (*KEYRING_CALLS, *UNCOUNTED_MEMORY_CALLS, *NAMESPACE_CALLS, *KERNEL_PROGRAM_CALLS)

X86_64_CALL_NUMBERS = {
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
AARCH64_CALL_NUMBERS = {
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
COMMON_CALL_NUMBERS = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsmount": 432,
    "memfd_secret": 447,
}
"""Calls that have one number on all kinds of processors."""
ARCHITECTURE_BY_MACHINE = {
    "x86_64": Architecture(0xC000003E, X86_64_CALL_NUMBERS | COMMON_CALL_NUMBERS),
    "aarch64": Architecture(0xC00000B7, AARCH64_CALL_NUMBERS | COMMON_CALL_NUMBERS),
}
"""The kinds of processors that the filter knows, by what `platform.machine` says."""
FIRST_X32_CALL_NUMBER = 0x40000000
"""From here on are numbers of x86-64's calls with short pointers, which would name refused ones anew."""

LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
RETURN = 0x06
CALL_NUMBER_OFFSET = 0  # of the system call's number in `struct seccomp_data`, in bytes
ARCHITECTURE_OFFSET = 4
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM  # the call fails with "operation not permitted"


def build_system_call_filter(machine: str = "", refused_calls: Sequence[str] = REFUSED_CALLS) -> bytes | None:
    """Build a seccomp filter, a program for the kernel, that refuses some system calls and allows all others.

    For the calls 101 and 165 the program is, an instruction per line:

        load the kind of processor of the call
        if it is another kind than `machine`: go to REFUSE
        load the number of the call
        if it is FIRST_X32_CALL_NUMBER or more: go to REFUSE
        if it is 101: go to REFUSE
        if it is 165: go to REFUSE
        return ALLOW
        return REFUSE

    Args:
        machine: The kind of processor as `platform.machine` names it, or empty for the one of this machine.
        refused_calls: The names of the system calls that the filter refuses.

    Returns:
        The program, or None for a kind of processor that is not in ARCHITECTURE_BY_MACHINE.
    """
    architecture = ARCHITECTURE_BY_MACHINE.get(machine or platform.machine())
    if architecture is None:
        return None

    refused_numbers = sorted(architecture.number_by_call[name] for name in refused_calls)
    # Before REFUSE stand four instructions, one for each number, and ALLOW.
    refuse_index = len(refused_numbers) + 5

    def count_skipped(index: int) -> int:
        """Return how many instructions a jump from the instruction `index` to REFUSE passes over."""
        return refuse_index - index - 1

    program = [
        _encode_instruction(LOAD, ARCHITECTURE_OFFSET),
        _encode_instruction(JUMP_IF_EQUAL, architecture.audit_number, jump_if_false=count_skipped(index=1)),
        _encode_instruction(LOAD, CALL_NUMBER_OFFSET),
        _encode_instruction(JUMP_IF_AT_LEAST, FIRST_X32_CALL_NUMBER, jump_if_true=count_skipped(index=3)),
    ]
    for index, number in enumerate(refused_numbers, start=len(program)):
        program.append(_encode_instruction(JUMP_IF_EQUAL, number, jump_if_true=count_skipped(index)))

    program.append(_encode_instruction(RETURN, ALLOW))
    program.append(_encode_instruction(RETURN, REFUSE))
    return b"".join(program)


def _encode_instruction(operation_code: int, operand: int, *, jump_if_true: int = 0, jump_if_false: int = 0) -> bytes:
    """Return the eight bytes of an instruction of a filter, a program that the kernel runs before each system call.

    Args:
        operation_code: What the instruction does, such as JUMP_IF_EQUAL.
        operand: What it loads, compares with or returns.
        jump_if_true: How many instructions a jump passes over if its comparison holds.
        jump_if_false: How many instructions it passes over if the comparison does not hold.
    """
    # The kernel's `struct sock_filter`: two bytes, two single bytes, and four bytes.
    return struct.pack("=HBBI", operation_code, jump_if_true, jump_if_false, operand)

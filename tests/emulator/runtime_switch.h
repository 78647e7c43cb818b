// What depends on the processor: changing over between stacks, flushing of subnormal values, and
// the instruction of a failed check.
#pragma once

#include <stdint.h>
#include <string.h>

// Saves the callee-saved registers and the stack, and goes on where `to` was saved.
extern "C" void emulator_switch(void** from, void* to) __asm__("emulator_switch");
#if defined(__x86_64__)
__asm__(
    ".text\nemulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
static void* fresh_stack(uint8_t* top, void (*start)()) {
  uint64_t* sp = reinterpret_cast<uint64_t*>(top);
  *--sp = 0;
  *--sp = reinterpret_cast<uint64_t>(start);
  for (int i = 0; i < 6; i++) *--sp = 0;
  return sp;
}
static unsigned set_flush(unsigned flush) {
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(flush ? before | 0x8040u : before & ~0x8040u);
  return (before & 0x8040u) != 0;
}
#elif defined(__aarch64__)
__asm__(
    ".text\n.p2align 2\nemulator_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
static void* fresh_stack(uint8_t* top, void (*start)()) {
  uint64_t* sp = reinterpret_cast<uint64_t*>(top - 160);
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<uint64_t>(start);
  return sp;
}
static unsigned set_flush(unsigned flush) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  uint64_t after = flush ? before | (1ul << 24) : before & ~(1ul << 24);
  __asm__ volatile("msr fpcr, %0" ::"r"(after));
  return (before >> 24) & 1u;
}
#else
#error "the emulator has no context switch for this processor"
#endif

// The number that clang puts into the instruction of a failed check, plus one.
static unsigned trap_number(const uint8_t* at) {
#if defined(__x86_64__)  // ud1l number(%eax), %eax
  if (at && at[0] == 0x67 && at[1] == 0x0f && at[2] == 0xb9)
    return at[3] == 0x40 ? at[4] + 1u : 1u;
#else  // brk #0x5500 + number
  unsigned word = at ? *reinterpret_cast<const uint32_t*>(at) >> 5 : 0;
  if ((word & 0xff00u) == 0x5500u) return (word & 0xffu) + 1u;
#endif
  return 0;
}

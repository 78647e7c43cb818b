// What compiled kernels and the scheduler (runtime.cpp) share. No header of the system: this text
// is parsed in front of every kernel.
#pragma once

#define EMULATOR_LANES 32
#define EMULATOR_SLOT 16  // bytes that one lane can hand to the others, a float4

enum EmulatorOperation : unsigned {
  EMULATOR_RETURN,  // the end of the kernel, where all lanes of a group have to meet as well
  EMULATOR_THREADGROUP_BARRIER,
  EMULATOR_SIMDGROUP_BARRIER,
  EMULATOR_REDUCE,
  EMULATOR_SCAN,
  EMULATOR_SHUFFLE,
  EMULATOR_SHUFFLE_XOR,
  EMULATOR_SHUFFLE_DOWN,
  EMULATOR_SHUFFLE_UP,
  EMULATOR_ROTATE,
  EMULATOR_BROADCAST,
  EMULATOR_VOTE,
};

// How lanes of a SIMD group are added up: the hardware's order is not specified.
enum EmulatorReduction : unsigned {
  EMULATOR_NEIGHBOURS,  // a tree over lanes 1, 2, 4, 8, 16 apart
  EMULATOR_HALVES,      // a tree over lanes 16, 8, 4, 2, 1 apart
  EMULATOR_SEQUENCE,    // lane 0 to lane 31
};

// The values of Metal's thread attributes, for one thread.
struct EmulatorThread {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threads_per_threadgroup[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned dispatch_threads_per_threadgroup[3];
  unsigned thread_index_in_threadgroup;
  unsigned threads_in_threadgroup;
};

// One meeting of a SIMD group: what each lane brought. Slots of absent lanes hold poison.
struct EmulatorMeeting {
  alignas(16) unsigned char slot[EMULATOR_LANES][EMULATOR_SLOT];
  alignas(16) unsigned char result[EMULATOR_LANES][EMULATOR_SLOT];
  unsigned present;    // bit i: lane i exists
  unsigned lane;       // of the caller
  unsigned reduction;  // EmulatorReduction
  unsigned done;       // the first lane that leaves fills `result` for all
};

#if defined(__clang__)
// Two calls must stay two and one must stay one: the return address tells calls apart.
#define EMULATOR_CONVERGENT __attribute__((convergent))
#else
#define EMULATOR_CONVERGENT
#endif

extern "C" {
// Waits until every lane of the SIMD group is here. `what` names the operation in reports; `key`
// is an argument that has to be the same in all lanes.
EmulatorMeeting* emulator_meet(unsigned operation, const char* what, const char* file,
                               unsigned line, unsigned key,
                               const unsigned char* value) EMULATOR_CONVERGENT;
// Threadgroup memory of one declaration, the same bytes for all threads of a threadgroup.
void* emulator_shared(unsigned declaration, unsigned bytes);
}

// SPDX-License-Identifier: Apache-2.0
// The part of NCCL that Lockstep calls, as a table of its functions: filled from libnccl.so.2 where
// that is found, or by a test. NCCL's own header is not needed: its numbers never change.
#pragma once

#include <cstddef>
#include <string>

// NCCL's and CUDA's names for what their handles point to.
struct ncclComm;
struct CUstream_st;
struct CUevent_st;

namespace lockstep::comm::nccl {

enum class Result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};
enum class DataType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  int64 = 4,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};
enum class RedOp : int { sum = 0, product = 1, max = 2, min = 3, avg = 4 };
struct UniqueId {
  char internal[128];
};
// ncclConfig_t as NCCL 2.14 had it first; later ones read no more than `size` and `version` say.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

struct Api {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  const char* (*get_error_string)(Result result);
  Result (*comm_init_rank_config)(ncclComm** comm, int size, UniqueId id, int rank, Config* config);
  Result (*comm_finalize)(ncclComm* comm);
  Result (*comm_destroy)(ncclComm* comm);
  Result (*comm_abort)(ncclComm* comm);
  Result (*comm_get_async_error)(ncclComm* comm, Result* error);
  Result (*comm_count)(const ncclComm* comm, int* size);
  Result (*comm_user_rank)(const ncclComm* comm, int* rank);
  Result (*comm_cu_device)(const ncclComm* comm, int* device);
  Result (*group_start)();
  Result (*group_end)();
  Result (*all_reduce)(const void* send, void* recv, size_t count, DataType type, RedOp op,
                       ncclComm* comm, CUstream_st* stream);
  Result (*reduce)(const void* send, void* recv, size_t count, DataType type, RedOp op, int root,
                   ncclComm* comm, CUstream_st* stream);
  Result (*broadcast)(const void* send, void* recv, size_t count, DataType type, int root,
                      ncclComm* comm, CUstream_st* stream);
  Result (*all_gather)(const void* send, void* recv, size_t send_count, DataType type,
                       ncclComm* comm, CUstream_st* stream);
  Result (*reduce_scatter)(const void* send, void* recv, size_t recv_count, DataType type, RedOp op,
                           ncclComm* comm, CUstream_st* stream);
  Result (*send)(const void* data, size_t count, DataType type, int peer, ncclComm* comm,
                 CUstream_st* stream);
  Result (*recv)(void* data, size_t count, DataType type, int peer, ncclComm* comm,
                 CUstream_st* stream);
  // Null where the version does not have them.
  const char* (*get_last_error)(ncclComm* comm) = nullptr;
  Result (*mem_alloc)(void** data, size_t size) = nullptr;
  Result (*mem_free)(void* data) = nullptr;
  Result (*comm_register)(const ncclComm* comm, void* data, size_t size, void** handle) = nullptr;
  Result (*comm_deregister)(const ncclComm* comm, void* handle) = nullptr;
};

// libnccl.so.2 as torch has it, or the system's. It is looked for once.
struct Library {
  const Api* api = nullptr;
  int version = 0;      // 22809 is 2.28.9
  std::string problem;  // why there is none
};
const Library& library();

}  // namespace lockstep::comm::nccl

// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <vector>

#include "lockstep/comm/backends/nccl/api.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::nccl {
namespace {

constexpr int kLeastVersion = 21400;  // communicators that do not block

// Where this process has libtorch from.
std::filesystem::path torch_folder() {
  std::filesystem::path folder;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const std::filesystem::path path(info->dlpi_name);
        if (!path.filename().string().starts_with("libtorch_cpu.so")) return 0;
        *static_cast<std::filesystem::path*>(found) = path.parent_path();
        return 1;
      },
      &folder);
  return folder;
}

// Next to torch (a pip wheel has it in a package of its own), then where CUDA is.
std::vector<std::string> candidates() {
  std::vector<std::string> paths{"libnccl.so.2"};  // also the one that torch has loaded
  if (const auto lib = torch_folder(); !lib.empty()) {
    paths.push_back(lib / "libnccl.so.2");
    paths.push_back(lib / "../../nvidia/nccl/lib/libnccl.so.2");
  }
  for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/lib"})
    paths.push_back(std::string(folder) + "/libnccl.so.2");
  return paths;
}

void* open_library() {
  for (const std::string& path : candidates()) {
    if (void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  return nullptr;
}

struct Symbols {
  void* handle;
  std::string missing = {};

  template <class Function>
  void take(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = name;
  }
  template <class Function>
  void take_if_there(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
  }
};

Library load() {
  void* const handle = open_library();
  if (handle == nullptr) return {.problem = "libnccl.so.2 was not found"};
  static Api api;
  Symbols symbols{handle};
  symbols.take(api.get_version, "ncclGetVersion");
  symbols.take(api.get_unique_id, "ncclGetUniqueId");
  symbols.take(api.get_error_string, "ncclGetErrorString");
  symbols.take(api.comm_init_rank_config, "ncclCommInitRankConfig");
  symbols.take(api.comm_finalize, "ncclCommFinalize");
  symbols.take(api.comm_destroy, "ncclCommDestroy");
  symbols.take(api.comm_abort, "ncclCommAbort");
  symbols.take(api.comm_get_async_error, "ncclCommGetAsyncError");
  symbols.take(api.comm_count, "ncclCommCount");
  symbols.take(api.comm_user_rank, "ncclCommUserRank");
  symbols.take(api.comm_cu_device, "ncclCommCuDevice");
  symbols.take(api.group_start, "ncclGroupStart");
  symbols.take(api.group_end, "ncclGroupEnd");
  symbols.take(api.all_reduce, "ncclAllReduce");
  symbols.take(api.reduce, "ncclReduce");
  symbols.take(api.broadcast, "ncclBroadcast");
  symbols.take(api.all_gather, "ncclAllGather");
  symbols.take(api.reduce_scatter, "ncclReduceScatter");
  symbols.take(api.send, "ncclSend");
  symbols.take(api.recv, "ncclRecv");
  symbols.take_if_there(api.get_last_error, "ncclGetLastError");
  symbols.take_if_there(api.mem_alloc, "ncclMemAlloc");
  symbols.take_if_there(api.mem_free, "ncclMemFree");
  symbols.take_if_there(api.comm_register, "ncclCommRegister");
  symbols.take_if_there(api.comm_deregister, "ncclCommDeregister");
  int version = 0;
  if (api.get_version != nullptr) api.get_version(&version);
  if (!symbols.missing.empty() || version < kLeastVersion) {
    return {.problem = format("libnccl.so.2 is version {}, must be at least {} (2.14){}", version,
                              kLeastVersion,
                              symbols.missing.empty() ? "" : "; it lacks " + symbols.missing)};
  }
  return {.api = &api, .version = version, .problem = {}};
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace lockstep::comm::nccl

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/pinning/pinning.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/memory/pinning/pinned_pages.h"

namespace lockstep::memory::detail {
namespace {

// As the kernel counts it against the limit.
int64_t locked_by_this_process() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

std::string limit_text() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited"
                                         : size_text(static_cast<int64_t>(limit.rlim_cur));
}

}  // namespace

void lock_pages(std::span<std::byte> pages, std::string_view what) {
  // On fault: the limit is checked now, and pages can be brought in by several threads.
  if (mlock2(pages.data(), pages.size(), MLOCK_ONFAULT) == 0) return;
  const int reason = errno;
  throw SystemError(
      format("[host memory] cannot pin {} for {}: {} are pinned already and the limit is {}; raise "
             "it (ulimit -l) or set offload.pin to false",
             size_text(static_cast<int64_t>(pages.size())), what,
             size_text(locked_by_this_process()), limit_text()),
      reason);
}

}  // namespace lockstep::memory::detail

namespace lockstep::memory {

PinnedPages::PinnedPages(std::span<std::byte> pages)
    : pages_(pages), refusal_(detail::cuda::register_pages(pages)) {}

PinnedPages::~PinnedPages() {
  if (refusal_.empty()) detail::cuda::unregister_pages(pages_);
}

}  // namespace lockstep::memory

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/interception.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel::detail {
namespace {

// An operator carries nothing that could say who called it but the thread that it runs on.
thread_local Recording* current = nullptr;

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (current == nullptr) return on_sharded_operator(op, keys, stack);
  const c10::impl::ExcludeDispatchKeyGuard exclude(kDispatchKey);
  current->call(op, stack);
}

// An operator with a kernel of its own for the key would not come here.
void check_no_kernels(const char* feature) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(kDispatchKey)) continue;
    throw ConfigError(
        format("[{}] another library has a kernel of {} for torch's dispatch key {}, which "
               "Lockstep needs for itself; use one of the two in a process",
               feature, c10::toString(name), c10::toString(kDispatchKey)));
  }
}

torch::Library registered(const char* feature) {
  check_no_kernels(feature);
  try {
    torch::Library made(torch::Library::IMPL, "_", kDispatchKey, "Lockstep", __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return made;
  } catch (const c10::Error& error) {
    const std::string reason = error.what_without_backtrace();
    throw ConfigError(
        format("[{}] torch's dispatch key {} is taken by another library; a process can have one "
               "fallback for it, so use one of the two in a process. torch says: {}",
               feature, c10::toString(kDispatchKey), reason.substr(0, reason.find('\n'))));
  }
}

}  // namespace

void install_fallback(const char* feature) {
  static std::atomic<bool> installed = false;
  if (installed) return;
  require_allowed(Interception::operators, feature);
  static const torch::Library library = registered(feature);
  installed = true;
}

RecordingScope::RecordingScope(Recording& recording)
    // Where the key cannot be had the thread is left as it was.
    : include_((install_fallback("deferred"), kDispatchKey)) {
  if (current != nullptr) {
    throw ConfigError("[deferred] called inside another call of deferred(), must not be");
  }
  current = &recording;
}

RecordingScope::~RecordingScope() { current = nullptr; }

}  // namespace lockstep::parallel::detail

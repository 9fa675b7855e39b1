// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <utility>

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

void fallback_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, kKeyBelowAutograd);
  on_operator_below_autograd(op, keys & after, stack);
}

// An operator with a kernel of its own for the key would not come here.
void check_no_kernels(c10::DispatchKey key, const char* feature) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(key)) continue;
    throw ConfigError(
        format("[{}] another library has a kernel of {} for torch's dispatch key {}, which "
               "Lockstep needs for itself; use one of the two in a process",
               feature, c10::toString(name), c10::toString(key)));
  }
}

torch::Library registered(c10::DispatchKey key, torch::CppFunction function, const char* feature) {
  check_no_kernels(key, feature);
  try {
    torch::Library made(torch::Library::IMPL, "_", key, "Lockstep", __LINE__);
    made.fallback(std::move(function));
    return made;
  } catch (const c10::Error& error) {
    const std::string reason = error.what_without_backtrace();
    throw ConfigError(
        format("[{}] torch's dispatch key {} is taken by another library; a process can have one "
               "fallback for it, so use one of the two in a process. torch says: {}",
               feature, c10::toString(key), reason.substr(0, reason.find('\n'))));
  }
}

}  // namespace

void install_fallback(const char* feature) {
  static std::atomic<bool> installed = false;
  if (installed) return;
  require_allowed(Interception::operators, feature);
  static const torch::Library library =
      registered(kDispatchKey, torch::CppFunction::makeFromBoxedFunction<&fallback>(), feature);
  installed = true;
}

void install_fallback_below_autograd(const char* feature) {
  static std::atomic<bool> installed = false;
  if (installed) return;
  require_allowed(Interception::operators, feature);
  static const torch::Library library =
      registered(kKeyBelowAutograd,
                 torch::CppFunction::makeFromBoxedFunction<&fallback_below_autograd>(), feature);
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

#include "lockstep/parallel/shard/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/shard/recording.h"

namespace lockstep::parallel::detail {
namespace {

// An operator carries nothing that could say who called it but the thread that it runs on.
thread_local Recording* current = nullptr;

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (current == nullptr) return on_sharded_operator(op, keys, stack);
  const c10::impl::ExcludeDispatchKeyGuard exclude(kDispatchKey);
  current->call(op, stack);
}

}  // namespace

void install_fallback() {
  static const auto library = [] {
    torch::Library made(torch::Library::IMPL, "_", kDispatchKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return made;
  }();
}

RecordingScope::RecordingScope(Recording& recording) : include_(kDispatchKey) {
  if (current != nullptr) {
    throw ConfigError("[deferred] called inside another call of deferred(), must not be");
  }
  install_fallback();
  current = &recording;
}

RecordingScope::~RecordingScope() { current = nullptr; }

}  // namespace lockstep::parallel::detail

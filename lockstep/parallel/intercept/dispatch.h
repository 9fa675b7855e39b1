// SPDX-License-Identifier: Apache-2.0
// The fallbacks that Lockstep has in torch's dispatcher.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace c10 {
class OperatorHandle;
}

namespace lockstep::parallel::detail {

class Recording;

// Reserved by torch for uses such as this; comes before autograd and autocast.
inline constexpr auto kDispatchKey = c10::DispatchKey::DeferredInit;

// The same, and comes after autograd, before the device.
inline constexpr auto kKeyBelowAutograd = c10::DispatchKey::Fake;

// Makes operators come here that are called with a tensor, or in a scope, that has the key. Any
// number of calls, from any thread; stays for the rest of the process. ConfigError, with the
// reason, for a `feature` that is first to need it where another library has the key or
// LOCKSTEP_INTERCEPT leaves operators alone.
void install_fallback(const char* feature);
// The same for kKeyBelowAutograd.
void install_fallback_below_autograd(const char* feature);

// While it lives, the operators of this thread go to the recording.
class RecordingScope {
 public:
  // Throws ConfigError if the thread is in such a scope, and what install_fallback() throws.
  explicit RecordingScope(Recording& recording);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

// Called for an operator on a tensor that has the key.
void on_sharded_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack);
// Called for an operator in a scope that has kKeyBelowAutograd; `below`: the keys that are left.
void on_operator_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                                torch::jit::Stack* stack);

}  // namespace lockstep::parallel::detail

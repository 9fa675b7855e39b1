// SPDX-License-Identifier: Apache-2.0
// What Lockstep intercepts in torch and in the process, for the whole process: nothing until a
// feature needs it, and nothing that LOCKSTEP_INTERCEPT leaves out. Private: not installed.
#pragma once

#include <string_view>

namespace lockstep::parallel::detail {

// operators: calls with tensors that have the dispatch key DeferredInit (fully_shard, deferred),
// and calls in a scope that has the key Fake (recompute that keeps products). saved_tensors: what
// autograd asks its default engine for when a node saves a tensor (recompute). faults: SIGSEGV, to
// name the parameter whose memory is not there (fully_shard).
enum class Interception { operators, saved_tensors, faults };

// LOCKSTEP_INTERCEPT is a list of the names above, "all" (the default) or "none". ConfigError for
// another word.
bool is_allowed(Interception interception);

// ConfigError, with what is lost, where `feature` needs what is not allowed.
void require_allowed(Interception interception, std::string_view feature);

}  // namespace lockstep::parallel::detail

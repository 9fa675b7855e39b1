// SPDX-License-Identifier: Apache-2.0
// Hooks on the tensors that autograd saves, from C++: an engine in front of the process's own.
// Private: not installed.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace lockstep::parallel::detail {

// Called by the thread that runs an operator, for each tensor that it saves. Null: not ours, and
// the engine behind is asked.
using HooksForSavedTensor = std::unique_ptr<torch::autograd::SavedVariableHooks> (*)();

// Makes our engine the default one, if it is not. All that it does besides is done by the engine
// that was the default before (torch's, Python's, or one of another library), so both work. Any
// number of calls, from any thread; one that comes after another library has set an engine of its
// own goes in front of that.
void install_saved_tensor_engine(HooksForSavedTensor hooks);

}  // namespace lockstep::parallel::detail

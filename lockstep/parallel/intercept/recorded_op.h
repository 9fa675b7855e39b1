// SPDX-License-Identifier: Apache-2.0
// What a recording is made of.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/intercept/operator_facts.h"

namespace lockstep::parallel::detail {

// Tensors are known by their storage and their place in it: handles and views come and go.
using StorageKey = const c10::StorageImpl*;

// Null for a tensor that has none.
inline StorageKey storage_of(const at::Tensor& tensor) {
  const bool stored = tensor.defined() && tensor.has_storage();
  return stored ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// A tensor over the storage, where `like` is in its own.
at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like);
// All bytes of the tensor's storage.
at::Tensor bytes_of(const at::Tensor& tensor);
// New memory on a device, as large as the tensor's storage.
c10::Storage new_storage(const at::Tensor& tensor, c10::Device device);

// An operator that created or changed storages whose values are not known yet.
struct Step {
  struct Write {
    StorageKey storage;
    bool whole;  // nothing of what was there before is left
  };

  // None: what memory held when it was first written to without being known; argument 0 has it.
  std::optional<c10::OperatorHandle> op = {};
  // Tensors that are not known yet as they were placed in their storages, others as copies.
  Arguments arguments = {};
  std::vector<at::Tensor> results = {};
  std::vector<StorageKey> reads = {};
  std::vector<Write> writes = {};
  std::optional<Draw> draw = {};
  // Whose numbers are drawn: those of the first of the model's tensors that they lead to. So what
  // two tensors have in common, as where one is a copy of the other, they have in common again.
  std::string owner = {};
  int number = 0;  // among the draws of the owner, from 1
};

// Calls a function for every defined tensor in an argument or result: a tensor or a list of them.
template <class Function>
void for_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_tensors(item, function);
  }
}

template <class Values, class Function>
void for_each_tensor(const Values& values, const Function& function) {
  for (const c10::IValue& value : values) for_tensors(value, function);
}

// The same with every tensor replaced by what the function makes of it.
template <class Function>
c10::IValue with_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? function(value.toTensor()) : value;
  if (!value.isList()) return value;
  c10::List<c10::IValue> list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, with_tensors(list.get(i), function));
  return list;
}

template <class Function>
Arguments with_tensors(const Arguments& values, const Function& function) {
  Arguments replaced;
  for (const c10::IValue& value : values) replaced.push_back(with_tensors(value, function));
  return replaced;
}

}  // namespace lockstep::parallel::detail

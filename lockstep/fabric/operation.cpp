// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/operation.h"

#include "lockstep/core/format.h"

namespace lockstep::fabric {

std::string_view name_of(OpKind kind) {
  constexpr std::string_view names[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                        "reduce_scatter", "all_to_all", "gather",    "scatter",
                                        "send",           "recv",       "barrier"};
  return names[static_cast<size_t>(kind)];
}

std::string_view name_of(ReduceOp op) {
  constexpr std::string_view names[] = {"sum", "avg", "product", "min", "max"};
  return names[static_cast<size_t>(op)];
}

std::string describe(const Signature& signature) {
  const OpKind kind = signature.kind;
  if (kind == OpKind::barrier) return "barrier()";
  std::string text =
      kind == OpKind::all_to_all
          ? format("{}({}", name_of(kind), name_of(signature.dtype))
          : format("{}({}[{}]", name_of(kind), name_of(signature.dtype), signature.count);
  if (kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter) {
    text += format(", {}", name_of(signature.reduce));
  }
  if (kind == OpKind::send) {
    text += format(", to {}", signature.root);
  } else if (kind == OpKind::recv) {
    text += format(", from {}", signature.root);
  } else if (signature.root >= 0) {
    text += format(", root {}", signature.root);
  }
  if (signature.tag[0] != '\0') text += format(", tag '{}'", std::string_view(signature.tag));
  return text + ")";
}

Signature signature_of(const Operation& operation) {
  Signature signature{};
  signature.kind = operation.kind;
  signature.reduce = operation.reduce;
  signature.dtype = operation.dtype;
  signature.root = operation.root;
  signature.count = operation.count;
  const size_t shown = operation.tag.copy(signature.tag, sizeof(signature.tag) - 1);
  // FNV-1a over the block sizes that must be the same everywhere, and over what does not fit of the
  // tag; the blocks of all_to_all differ by rank.
  signature.counts_hash = 14695981039346656037ull;
  const auto mix = [&signature](uint64_t value) {
    signature.counts_hash = (signature.counts_hash ^ value) * 1099511628211ull;
  };
  const auto& counts =
      operation.kind == OpKind::all_gather ? operation.recv_counts : operation.send_counts;
  if (operation.kind == OpKind::all_gather || operation.kind == OpKind::reduce_scatter) {
    for (const int64_t count : counts) mix(static_cast<uint64_t>(count));
  }
  for (const char byte : operation.tag.substr(shown)) mix(static_cast<unsigned char>(byte));
  return signature;
}

std::string describe(const Operation& operation) { return describe(signature_of(operation)); }

}  // namespace lockstep::fabric

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/same_model.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/bucket.h"

namespace lockstep::parallel::detail {
namespace {

constexpr size_t kPacketBytes = size_t{1} << 20;

std::string describe(const std::pair<std::string, at::Tensor>& named) {
  const auto& [name, tensor] = named;
  return format("{} {}[{}]{}", name, c10::toString(tensor.scalar_type()), join(tensor.sizes()),
                tensor.requires_grad() ? "" : " without gradient");
}

// FNV-1a: the same on all machines, unlike std::hash.
int64_t digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return static_cast<int64_t>(hash);
}

// "fc.weight Float[4, 8] on ranks 0, 2; fc.weight Float[4, 9] on rank 1"
std::string who_has_what(const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::vector<size_t>>> holders;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    auto found = std::find_if(holders.begin(), holders.end(),
                              [&](auto& holder) { return holder.first == texts[rank]; });
    if (found == holders.end()) found = holders.insert(holders.end(), {texts[rank], {}});
    found->second.push_back(rank);
  }
  std::vector<std::string> parts;
  for (const auto& [text, ranks] : holders)
    parts.push_back(format("{} on rank{} {}", text, ranks.size() > 1 ? "s" : "", join(ranks)));
  return join(parts, "; ");
}

}  // namespace

namespace {

using Describe = std::string (*)(const std::pair<std::string, at::Tensor>&);

void compare(const char* operation, const NamedTensors& tensors, Describe describe,
             const comm::Group& group) {
  const auto count = static_cast<int64_t>(tensors.size());
  const at::Tensor counts = at::empty({group.size()}, at::kLong);
  comm::all_gather(counts, at::full({1}, count, at::kLong), group).wait();
  const int64_t common = counts.min().item<int64_t>();

  const at::Tensor digests = at::empty({common}, at::kLong);
  for (int64_t i = 0; i < common; ++i)
    digests.data_ptr<int64_t>()[i] = digest(describe(tensors[static_cast<size_t>(i)]));
  const at::Tensor all = at::empty({group.size(), common}, at::kLong);
  comm::all_gather(all, digests, group).wait();
  const at::Tensor differs = all.ne(all[0]).any(0);

  int64_t first = common;
  for (int64_t i = common - 1; i >= 0; --i) {
    if (differs[i].item<bool>()) first = i;
  }
  if (first == common && counts.eq(count).all().item<bool>()) return;
  const std::string mine =
      first < count ? describe(tensors[static_cast<size_t>(first)]) : "nothing";
  throw ConfigError(format(
      "[{}] the ranks' models differ at tensor {} of {}: {}; all ranks must build the same model",
      operation, first,
      join(std::vector<int64_t>(counts.data_ptr<int64_t>(),
                                counts.data_ptr<int64_t>() + group.size()),
           "/"),
      who_has_what(comm::gather_texts(mine, group))));
}

}  // namespace

void check_same_model(const char* operation, const NamedTensors& tensors,
                      const comm::Group& group) {
  compare(operation, tensors, describe, group);
}

void check_same_strides(const char* operation, const NamedTensors& parameters,
                        const comm::Group& group) {
  const Describe with_strides = [](const std::pair<std::string, at::Tensor>& named) {
    const at::Tensor& tensor = named.second;
    if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return describe(named);
    return format("{} with strides ({})", describe(named), join(tensor.strides()));
  };
  compare(operation, parameters, with_strides, group);
}

void broadcast_tensors(const NamedTensors& tensors, const comm::Group& group, int root) {
  const c10::AutoGradMode no_grad(false);
  std::vector<Parameter> parts;
  for (const auto& [name, tensor] : tensors)
    parts.push_back(
        {.name = name, .tensor = tensor.variable_data()});  // no version of autograd's changes
  std::vector<size_t> order(parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (const auto& members : plan_buckets(parts, order, kPacketBytes, kPacketBytes)) {
    std::vector<at::Tensor> pieces;
    for (const size_t index : members) pieces.push_back(parts[index].tensor.flatten());
    const at::Tensor packet = pieces.size() == 1 ? parts[members[0]].tensor : at::cat(pieces);
    comm::broadcast(packet, group, {.root = root, .tag = parts[members[0]].name + " ..."}).wait();
    if (pieces.size() == 1 || group.rank() == root) continue;
    int64_t offset = 0;
    for (const size_t index : members) {
      const at::Tensor& target = parts[index].tensor;
      target.copy_(packet.narrow(0, offset, target.numel()).view(target.sizes()));
      offset += target.numel();
    }
  }
}

void check_own_devices(const char* operation, const NamedTensors& parameters,
                       const comm::Group& group) {
  if (!parameters.empty()) check_own_devices(operation, parameters[0].second.device(), group);
}

void check_own_devices(const char* operation, c10::Device device, const comm::Group& group) {
  if (group.backend() != "thread") return;
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  const int64_t mine = device.is_cuda() ? device.index() : -1 - group.rank();
  comm::all_gather(all, at::full({1}, mine, at::kLong), group).wait();
  const std::set<int64_t> distinct(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + group.size());
  if (distinct.size() == static_cast<size_t>(group.size())) return;
  throw ConfigError(
      format("[{}] {} ranks that are threads train on {} devices; give each a GPU of its own, or "
             "make them processes",
             operation, group.size(), distinct.size()));
}

size_t agree_on_bucket_size(std::optional<size_t> bytes, const comm::Group& group) {
  const at::Tensor mine = at::zeros({1, 2}, at::kLong);  // whether there is one, and the size
  mine.data_ptr<int64_t>()[0] = bytes ? 1 : 0;
  mine.data_ptr<int64_t>()[1] = static_cast<int64_t>(bytes.value_or(0));
  const at::Tensor all = at::empty({group.size(), 2}, at::kLong);
  comm::all_gather(all, mine, group, {.tag = "bucket size"}).wait();
  std::vector<std::string> texts;
  std::set<size_t> sizes;
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t* const theirs = all[rank].data_ptr<int64_t>();
    texts.push_back(theirs[0] > 0 ? format("{}", static_cast<size_t>(theirs[1])) : "none");
    if (theirs[0] > 0) sizes.insert(static_cast<size_t>(theirs[1]));
  }
  if (sizes.size() == 1 && *sizes.begin() > 0) return *sizes.begin();
  throw ConfigError(format(
      "[ddp] set_bucket_size: the size is {}; all ranks must give the same size, at least 1 byte",
      who_has_what(texts)));
}

void check_same_threads(const char* operation, const comm::Group& group) {
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  comm::all_gather(all, at::full({1}, at::get_num_threads(), at::kLong), group).wait();
  if (all.eq(all[0]).all().item<bool>()) return;
  throw ConfigError(format(
      "[{}] reproducible needs the same number of compute threads on all ranks; they have {}",
      operation,
      join(std::vector<int64_t>(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + group.size()))));
}

}  // namespace lockstep::parallel::detail

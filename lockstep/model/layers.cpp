// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/layers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/model/block.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/context/context.h"
#include "lockstep/nn/document_attention.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::model {
namespace {

using config::ModelKind;
using parallel::LayerForward;
using parallel::Tensors;

constexpr const char* kEmbedding = "embed";

// theta^(-2i/D). With Llama 3's scaling, waves longer than the sequences of the first training are
// stretched by the factor, short ones are left, and those between are blended.
std::vector<double> rotary_frequencies(const config::ModelSpec& spec) {
  std::vector<double> frequencies;
  const int64_t width = spec.head_size();
  for (int64_t i = 0; i < width; i += 2) {
    double frequency =
        std::pow(spec.rope_theta, -static_cast<double>(i) / static_cast<double>(width));
    if (const auto& scaling = spec.rope_scaling) {
      const double wave = 2 * std::numbers::pi / frequency;
      const double turns = static_cast<double>(scaling->original_positions) / wave;
      const double kept = (turns - scaling->low_freq_factor) /
                          (scaling->high_freq_factor - scaling->low_freq_factor);
      const double share = std::clamp(kept, 0.0, 1.0);
      frequency = share * frequency + (1 - share) * frequency / scaling->factor;
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

// The documents of the rows that blocks compute now, found once for all blocks.
class PackedRows {
 public:
  PackedRows(int64_t window, nn::ContextRanks context)
      : window_(window), context_(std::move(context)) {}

  struct Found {
    at::Tensor of;      // held, so that no other tensor takes its place
    at::Tensor values;  // that it had
    nn::Documents documents;
    at::Tensor rotation;  // of all tokens, where positions are rotary
  };

  Found at(const at::Tensor& positions, const at::Tensor& rotation, c10::Device device) {
    if (found_.of.is_same(positions) && found_.values.equal(positions)) return found_;
    found_ = {positions, positions.clone(), nn::documents_of(positions, device, window_, context_),
              at::Tensor()};
    if (rotation.defined()) found_.rotation = rotation.index_select(1, found_.documents.positions);
    return found_;
  }

  // The positions of this rank's tokens (B, T / ranks), of those of whole rows.
  at::Tensor local(const at::Tensor& positions) const {
    const comm::Group& group = context_.group;
    if (group.size() == 1) return positions;
    return positions.index_select(
        1,
        at::tensor(nn::context_places(positions.size(1), group.size(), group.rank()), at::kLong));
  }

 private:
  int64_t window_;
  nn::ContextRanks context_;
  Found found_;
};

// What the layers on one rank share.
struct Shared {
  const config::ModelSpec spec;
  const at::TensorOptions tensors;
  const std::shared_ptr<nn::RandomContext> random;
  const std::shared_ptr<Decoding> decoding;  // may be null
  const std::shared_ptr<PackedRows> packed;
  const std::shared_ptr<Tiling> tiling;  // may be null
  at::Tensor rotation = {};              // llama: made by the first block

  Parts parts() const { return {spec, tensors}; }
};

Decoding* active(const std::shared_ptr<Decoding>& decoding) {
  return decoding && decoding->is_active() ? decoding.get() : nullptr;
}

LayerForward build_embedding(const Shared& shared, torch::nn::Module& stage) {
  Parts parts = shared.parts();
  nn::Embedding embed = parts.embedding(stage, kEmbedding);
  nn::Embedding positions{nullptr};
  if (shared.spec.kind == ModelKind::gpt) positions = parts.embedding(stage, "positions");
  nn::Dropout dropout = stage.register_module("dropout", nn::Dropout(shared.spec.dropout));
  nn::attach_random(*dropout, shared.random, "dropout");
  return [embed, positions, dropout, limit = shared.spec.positions, decoding = shared.decoding,
          packed = shared.packed](const Tensors& in) mutable {
    const at::Tensor& tokens = in.at(0);
    if (const Decoding* const now = active(decoding)) {
      const at::Tensor x = embed(tokens);
      return Tensors{positions.is_empty() ? x : x + positions(now->positions().unsqueeze(0))};
    }
    if (tokens.dim() != 2 || tokens.size(1) > limit) {
      throw ConfigError(format("[LanguageModel] tokens are ({}), must be (B, T) with T at most {}",
                               join(tokens.sizes()), limit));
    }
    at::Tensor x = embed(tokens);
    if (in.size() == 1) {
      if (!positions.is_empty()) x = x + positions->first(tokens.size(1));
      return Tensors{dropout(x)};
    }
    const at::Tensor places = packed->local(in[1]);
    if (places.sizes() != tokens.sizes()) {
      throw ConfigError(
          format("[LanguageModel] tokens are ({}), their positions ({}), must be alike",
                 join(tokens.sizes()), join(places.sizes())));
    }
    if (!positions.is_empty()) x = x + positions(places.to(tokens.device()));
    return Tensors{dropout(x), in[1]};
  };
}

LayerForward build_block(Shared& shared, int64_t layer, torch::nn::Module& stage) {
  if (shared.spec.kind == ModelKind::llama && !shared.rotation.defined()) {
    shared.rotation = nn::rotary_table(rotary_frequencies(shared.spec), shared.spec.positions)
                          .to(shared.tensors.device());
  }
  Parts parts = shared.parts();
  Block block(parts, layer, shared.tiling ? shared.tiling->size : 0);
  const std::string path = format("blocks.{}", layer);
  nn::attach_random(*block, shared.random, path + ".");
  parallel::register_layer(stage, path, block.ptr());
  return [block, rotation = shared.rotation, decoding = shared.decoding,
          packed = shared.packed](const Tensors& in) mutable {
    if (Decoding* const now = active(decoding)) {
      const at::Tensor turned = rotation.defined() && !now->are_new()
                                    ? rotation.index_select(1, now->positions())
                                    : rotation;
      return Tensors{block(in.at(0), turned, now)};
    }
    if (in.size() == 1) return Tensors{block(in[0], rotation)};
    const PackedRows::Found rows = packed->at(in.at(1), rotation, in[0].device());
    return Tensors{block(in[0], rows.rotation, nullptr, &rows.documents), in[1]};
  };
}

LayerForward build_head(const Shared& shared, torch::nn::Module& stage) {
  Parts parts = shared.parts();
  // The logits of the vectors that are wanted, normed; of few new tokens by one kernel.
  const auto head = [norm = parts.norm(stage, "", "norm"), decoding = shared.decoding,
                     tiling = shared.tiling](const at::Tensor& x, const auto& layer,
                                             const at::Tensor& bias, const auto& logits) {
    const Decoding* const now = active(decoding);
    if (tiling && tiling->loss) {
      const auto path = [norm, logits, loss = std::exchange(tiling->loss, {})](
                            const at::Tensor& part, int64_t begin) {
        return loss(logits(norm(part)), begin).view({1, 1});
      };
      return Tensors{parallel::in_tiles(path, x, {.dim = 1, .size = tiling->size}).sum()};
    }
    if (now != nullptr && now->are_new() && nn::can_fuse(x) && !layer->sharing)
      return Tensors{nn::fused_linear(x, fused(layer->weight, bias, norm))};
    const bool selects = now != nullptr && !now->are_new();
    return Tensors{logits(norm(selects ? x.index_select(1, now->wanted()) : x))};
  };
  if (!shared.spec.is_tied()) {
    return [head, linear = parts.linear(stage, "", "head").ptr()](const Tensors& in) {
      return head(in.at(0), linear, linear->bias,
                  [linear](const at::Tensor& x) { return linear->forward(x); });
    };
  }
  const auto found = parallel::find_layer(stage, kEmbedding);
  const auto embed = found ? std::dynamic_pointer_cast<nn::EmbeddingImpl>(found)
                           : parts.embedding(stage, kEmbedding).ptr();
  return [head, embed](const Tensors& in) {
    return head(in.at(0), embed, at::Tensor(),
                [embed](const at::Tensor& x) { return embed->logits(x); });
  };
}

}  // namespace

std::vector<parallel::Layer> language_model_layers(const config::ModelSpec& spec,
                                                   at::TensorOptions tensors,
                                                   std::shared_ptr<nn::RandomContext> random,
                                                   std::shared_ptr<Decoding> decoding,
                                                   const nn::ContextRanks& context,
                                                   std::shared_ptr<Tiling> tiling) {
  const auto shared = std::make_shared<Shared>(
      Shared{spec, tensors, std::move(random), std::move(decoding),
             std::make_shared<PackedRows>(spec.window, context), std::move(tiling)});
  std::vector<parallel::Layer> layers;
  layers.push_back({[shared](torch::nn::Module& stage) { return build_embedding(*shared, stage); },
                    /*recompute=*/false});
  for (int64_t i = 0; i < spec.layers; ++i) {
    layers.push_back(
        {[shared, i](torch::nn::Module& stage) { return build_block(*shared, i, stage); }});
  }
  layers.push_back({[shared](torch::nn::Module& stage) { return build_head(*shared, stage); },
                    /*recompute=*/false, /*tied=*/spec.is_tied() ? kEmbedding : ""});
  return layers;
}

}  // namespace lockstep::model

// SPDX-License-Identifier: Apache-2.0
// Chunks of a row meet in two ways. A chunk with itself is a causal tile. A chunk with an earlier
// one is a rectangle: at most one document spans both, so the queries that see any key are the
// first ones, of that document, and they see the last keys.
#include "lockstep/nn/context/attention_tiles.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

namespace lockstep::nn {
namespace {

// Tokens of a row, and where a rank has them.
struct Chunk {
  layout::Range tokens;
  int64_t place = 0;

  layout::Range places(layout::Range of) const {
    return {place + of.begin - tokens.begin, place + of.end - tokens.begin};
  }
};

class TilePlanner {
 public:
  TilePlanner(const at::Tensor& starts, int64_t window, c10::Device device)
      : starts_(starts),
        start_(starts.data_ptr<int64_t>()),
        window_(window > 0 ? window : starts.numel()),
        device_(device) {}

  void add(std::vector<AttentionTile>& tiles, const Chunk& queries, const Chunk& keys) const {
    if (keys.tokens.begin > queries.tokens.begin) return;
    if (keys.tokens.begin == queries.tokens.begin) {
      tiles.push_back(diagonal(queries));
      return;
    }
    const int64_t first = queries.tokens.begin, key_end = keys.tokens.end;
    const layout::Range seen{std::max({keys.tokens.begin, start_[first], first - window_ + 1}),
                             key_end};
    if (seen.empty()) return;
    // Of this document, and not too far behind the keys.
    const int64_t last = std::min(queries.tokens.end, key_end + window_ - 1);
    const int64_t end = std::partition_point(start_ + first, start_ + last,
                                             [&](int64_t start) { return start < key_end; }) -
                        start_;
    // The window of the first ones begins before the keys.
    const int64_t whole = std::min(end, seen.begin + window_);
    const auto tile = [&](layout::Range part, int64_t window) {
      if (part.empty()) return;
      put(tiles, {.queries = queries.places(part),
                  .keys = keys.places(seen),
                  .query_position = part.begin,
                  .key_position = seen.begin,
                  .window = window,
                  .whole = part == queries.tokens && seen == keys.tokens});
    };
    tile({first, whole}, 0);
    tile({whole, end}, window_);
  }

 private:
  AttentionTile diagonal(const Chunk& chunk) const {
    const auto [begin, end] = chunk.tokens;
    AttentionTile tile{.queries = chunk.places(chunk.tokens),
                       .keys = chunk.places(chunk.tokens),
                       .causal = true,
                       .query_position = begin,
                       .key_position = begin,
                       .window = window_ < end - begin ? window_ : 0};
    tile.whole = start_[end - 1] <= begin;
    if (tile.whole) return tile;
    tile.starts = starts_;
    if (!device_.is_cuda()) return tile;
    std::vector<int32_t> borders{0};
    for (int64_t token = begin + 1; token < end; ++token)
      if (start_[token] == token) borders.push_back(static_cast<int32_t>(token - begin));
    borders.push_back(static_cast<int32_t>(end - begin));
    for (size_t i = 1; i < borders.size(); ++i)
      tile.longest = std::max<int64_t>(tile.longest, borders[i] - borders[i - 1]);
    tile.borders = at::tensor(borders, at::kInt).to(device_);
    return tile;
  }

  // Rectangles of which every query sees every key become one where they are neighbours.
  static void put(std::vector<AttentionTile>& tiles, const AttentionTile& tile) {
    AttentionTile* const before = tiles.empty() ? nullptr : &tiles.back();
    if (before != nullptr && !before->causal && before->window == 0 && tile.window == 0) {
      if (before->keys == tile.keys && before->queries.end == tile.queries.begin) {
        before->queries.end = tile.queries.end;
        before->whole = before->whole && tile.whole;
        return;
      }
      if (before->queries == tile.queries && before->keys.end == tile.keys.begin) {
        before->keys.end = tile.keys.end;
        before->whole = before->whole && tile.whole;
        return;
      }
    }
    tiles.push_back(tile);
  }

  const at::Tensor starts_;
  const int64_t* start_;
  int64_t window_;
  c10::Device device_;
};

}  // namespace

layout::Range AttentionTile::seen(int64_t query) const {
  const int64_t token = query_position + query;
  layout::Range range{0, causal ? query + 1 : keys.size()};
  if (starts.defined())
    range.begin = std::max(range.begin, starts.data_ptr<int64_t>()[token] - key_position);
  if (window > 0) range.begin = std::max(range.begin, token - window + 1 - key_position);
  return range;
}

Ring plan_ring(const at::Tensor& starts, int64_t rows, int64_t window, const comm::Group& group,
               c10::Device device, ChunksOf chunks_of) {
  const int ranks = group.size();
  const int64_t length = starts.numel() / rows, chunk = length / ranks / 2;
  const TilePlanner planner(starts, window, device);
  Ring ring{.group = group, .steps = {}};
  for (int step = 0; step < ranks; ++step) {
    const auto mine = chunks_of(ranks, group.rank()),
               theirs = chunks_of(ranks, (group.rank() - step + ranks) % ranks);
    auto& tiles = ring.steps.emplace_back();
    for (int64_t row = 0; row < rows; ++row) {
      const auto at = [&](const std::array<int64_t, 2>& chunks, int half) {
        const int64_t begin = row * length + chunks[static_cast<size_t>(half)] * chunk;
        return Chunk{{begin, begin + chunk}, (2 * row + half) * chunk};
      };
      for (const int queries : {0, 1})
        for (const int keys : {0, 1}) planner.add(tiles, at(mine, queries), at(theirs, keys));
    }
  }
  return ring;
}

}  // namespace lockstep::nn

// Finds one head of one batch item in a strided tensor.
#pragma once

#include <type_traits>

#include "attention.h"

namespace qkv {

// One key/value head of one batch item.
struct Plane {
  int64_t batch, kv_head;

  bool operator==(const Plane& other) const {
    return batch == other.batch && kv_head == other.kv_head;
  }
};

// The offset of element [batch, head, 0, 0], in elements.
inline int64_t plane_offset(const Problem& problem, const Strides& strides, int64_t batch,
                            int64_t head) {
  if (strides.head_repeat > 1) head /= strides.head_repeat;
  return batch_offset(problem, strides, batch, head * strides.head);
}

// Where the rows of that head begin: in a tensor that has a row for each query of the item, or for
// each key.
inline int64_t query_offset(const Problem& p, const Strides& strides, int64_t batch, int64_t head) {
  return plane_offset(p, strides, batch, head) + p.rows.query_begin * strides.row;
}
inline int64_t key_offset(const Problem& p, const Strides& strides, Plane of) {
  return plane_offset(p, strides, p.spans ? p.rows.key_item : of.batch, of.kv_head) +
         p.rows.key_begin * strides.row;
}
// The same in a tensor [B..., H, S], whose columns are the keys.
inline int64_t key_column_offset(const Problem& p, const Strides& strides, int64_t batch,
                                 int64_t head) {
  return plane_offset(p, strides, p.spans ? p.rows.key_item : batch, head) +
         p.rows.key_begin * strides.col;
}

// The elements at these offsets; null if the tensor is. An Input's elements are const.
template <class T, class Tensor>
auto element_at(const Tensor& tensor, int64_t offset) {
  using Element = std::conditional_t<std::is_same_v<Tensor, Input>, const T, T>;
  return tensor.data ? static_cast<Element*>(tensor.data) + offset : nullptr;
}
template <class T, class Tensor>
auto plane(const Problem& p, const Tensor& tensor, int64_t batch, int64_t head) {
  return element_at<T>(tensor, plane_offset(p, tensor.strides, batch, head));
}
template <class T, class Tensor>
auto query_plane(const Problem& p, const Tensor& tensor, int64_t batch, int64_t head) {
  return element_at<T>(tensor, query_offset(p, tensor.strides, batch, head));
}
template <class T, class Tensor>
auto key_plane(const Problem& p, const Tensor& tensor, Plane of) {
  return element_at<T>(tensor, key_offset(p, tensor.strides, of));
}

}  // namespace qkv

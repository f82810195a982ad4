#include "shapes.h"

#include <cmath>
#include <random>
#include <regex>
#include <stdexcept>

namespace qkv::scaling {
namespace {

std::vector<float> numbers(int64_t count, unsigned seed) {
  std::vector<float> found(static_cast<size_t>(count));
  std::minstd_rand random(seed);
  std::normal_distribution<float> normal;
  for (float& x : found) x = normal(random);
  return found;
}

Strides dense(int64_t heads, int64_t rows, int64_t cols) {
  Strides s;
  s.batch[0] = heads * rows * cols, s.head = rows * cols, s.row = cols, s.col = 1;
  return s;
}

}  // namespace

Call::Call(const std::string& shape) {
  static const std::regex spelling("(\\d+)x(\\d+)(?:/(\\d+))?x(\\d+)x(\\d+)x(\\d+)(c?)");
  std::smatch found;
  if (!std::regex_match(shape, found, spelling))
    throw std::invalid_argument("'" + shape + "' is not BxHq[/Hkv]xLxSxD[c]");
  const auto size = [&](int n) { return int64_t(std::stoll(found[n])); };
  batch_ = size(1), heads_ = size(2), kv_heads_ = found[3].matched ? size(3) : heads_;
  seqlen_q_ = size(4), seqlen_k_ = size(5), head_dim_ = size(6), is_causal_ = found[7].length();
  of_query_ = dense(heads_, seqlen_q_, head_dim_);
  of_key_ = dense(kv_heads_, seqlen_k_, head_dim_);
  of_lse_ = dense(heads_, seqlen_q_, 1);
  const int64_t queries = batch_ * heads_ * seqlen_q_, keys = batch_ * kv_heads_ * seqlen_k_;
  query_ = numbers(queries * head_dim_, 1), grad_output_ = numbers(queries * head_dim_, 2);
  key_ = numbers(keys * head_dim_, 3), value_ = numbers(keys * head_dim_, 4);
  output_.resize(query_.size()), grad_query_.resize(query_.size());
  grad_key_.resize(key_.size()), grad_value_.resize(key_.size());
  lse_.resize(static_cast<size_t>(queries));
}

Problem Call::problem(int threads) const {
  Problem p;
  p.batch_rank = 1, p.batch_sizes[0] = batch_;
  p.heads = heads_, p.kv_heads = kv_heads_;
  p.seqlen_q = seqlen_q_, p.seqlen_k = seqlen_k_, p.head_dim = p.head_dim_v = head_dim_;
  p.scale = 1 / std::sqrt(double(head_dim_)), p.is_causal = is_causal_;
  p.query = {query_.data(), of_query_}, p.key = {key_.data(), of_key_};
  p.value = {value_.data(), of_key_};
  p.num_threads = threads;
  return p;
}

void Call::forward(int threads) const {
  attention_forward(problem(threads), {{output_.data(), of_query_}, {lse_.data(), of_lse_}});
}

void Call::backward(int threads) const {
  BackwardArgs args;
  args.output = {output_.data(), of_query_}, args.lse = {lse_.data(), of_lse_};
  args.grad_output = {grad_output_.data(), of_query_};
  args.grad_query = {grad_query_.data(), of_query_}, args.grad_key = {grad_key_.data(), of_key_};
  args.grad_value = {grad_value_.data(), of_key_};
  attention_backward(problem(threads), args);
}

int64_t Call::gradient_bytes() const {
  return int64_t(sizeof(float) * (grad_query_.size() + grad_key_.size() + grad_value_.size()));
}

}  // namespace qkv::scaling

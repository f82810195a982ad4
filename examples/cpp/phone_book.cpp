// Attention as a soft phone book, trained in C++ with no Python.
//
// Every sample is a new phone book: names in random order, each with a random
// number. The model is asked for the number of one of them. It cannot
// remember the answer, for the next book has another; it has to learn to look it up:
// query = the name asked for, keys = the names in the book, values = their numbers.
//
// Exits with 1 if it has not learnt that at the end.
#include <qkv/attention.h>
#include <torch/torch.h>

#include <iomanip>
#include <iostream>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kNames = 64, kNumbers = 32;  // all names and numbers that there are
constexpr int64_t kEntries = 24;               // entries of the longest book
constexpr int64_t kWidth = 64, kHeads = 4;

// B phone books, each with one question.
struct Batch {
  Tensor names;    // [B, kEntries] the book's names, all different
  Tensor numbers;  // [B, kEntries] and their numbers
  Tensor filled;   // [B, kEntries] bool: shorter books end earlier
  Tensor asked;    // [B] a name in the book
  Tensor answer;   // [B] its number
};

Batch draw(int64_t size) {
  Batch batch;
  batch.names = torch::rand({size, kNames}).argsort(int64_t(1)).slice(1, 0, kEntries);
  batch.numbers = torch::randint(kNumbers, {size, kEntries});
  const Tensor length = torch::randint(1, kEntries + 1, {size, 1});
  batch.filled = torch::arange(kEntries) < length;
  const Tensor entry = (torch::rand({size, 1}) * length).to(torch::kLong);
  batch.asked = batch.names.gather(1, entry).squeeze(1);
  batch.answer = batch.numbers.gather(1, entry).squeeze(1);
  return batch;
}

struct PhoneBookImpl : nn::Module {
  nn::Embedding name{nullptr}, number{nullptr};
  nn::Linear to_query{nullptr}, to_key{nullptr}, to_value{nullptr}, to_answer{nullptr};

  PhoneBookImpl() {
    name = register_module("name", nn::Embedding(kNames, kWidth));
    number = register_module("number", nn::Embedding(kNumbers, kWidth));
    to_query = register_module("to_query", nn::Linear(kWidth, kWidth));
    to_key = register_module("to_key", nn::Linear(kWidth, kWidth));
    to_value = register_module("to_value", nn::Linear(kWidth, kWidth));
    to_answer = register_module("to_answer", nn::Linear(kWidth, kNumbers));
  }

  // [B, n, kWidth] -> [B, kHeads, n, kWidth / kHeads], a view
  static Tensor heads(const Tensor& x) { return x.unflatten(-1, {kHeads, -1}).transpose(1, 2); }

  Tensor forward(const Batch& batch) {  // [B, kNumbers], the logits of the answer
    const Tensor query = heads(to_query(name(batch.asked.unsqueeze(1))));
    const Tensor key = heads(to_key(name(batch.names)));
    const Tensor value = heads(to_value(number(batch.numbers)));
    const Tensor mask = batch.filled.unsqueeze(1).unsqueeze(1);  // [B, 1, 1, kEntries]
    const Tensor found = qkv::attention(query, key, value, qkv::AttentionOptions().attn_mask(mask));
    return to_answer(found.transpose(1, 2).flatten(1));
  }
};
TORCH_MODULE(PhoneBook);

double accuracy(PhoneBook& model) {
  torch::NoGradGuard guard;
  const Batch batch = draw(2000);
  return model(batch).argmax(1).eq(batch.answer).to(torch::kDouble).mean().item<double>();
}

int main() {
  torch::manual_seed(0);
  PhoneBook model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  std::cout << std::fixed << std::setprecision(3) << "before training: accuracy " << accuracy(model)
            << " on new phone books\n";

  for (int step = 1; step <= 300; ++step) {
    const Batch batch = draw(64);
    optimizer.zero_grad();
    const Tensor loss = nn::functional::cross_entropy(model(batch), batch.answer);
    loss.backward();
    optimizer.step();
    if (step % 50 == 0)
      std::cout << "step " << step << ": loss " << loss.item<double>() << ", accuracy "
                << accuracy(model) << "\n";
  }

  const double reached = accuracy(model);
  const bool converged = reached > 0.99;
  std::cout << (converged ? "It looks numbers up: " : "It has not learnt to look numbers up: ")
            << "accuracy " << reached << "\n";
  return converged ? 0 : 1;
}

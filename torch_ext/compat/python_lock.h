// Python's lock, for a library that knows no Python: in a program without it, these are null.
#pragma once

#define QKV_OF_PYTHON __attribute__((weak, visibility("default")))
extern "C" {
QKV_OF_PYTHON int Py_IsInitialized();
QKV_OF_PYTHON int PyGILState_Check();
QKV_OF_PYTHON void* PyEval_SaveThread();
QKV_OF_PYTHON void PyEval_RestoreThread(void*);
}
#undef QKV_OF_PYTHON

namespace qkv {

// Gives the lock back while it lives, if this thread has it: torch's autograd engine refuses to run
// under it, and torch.compile calls operators on fake tensors with it.
class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    if (PyEval_RestoreThread && Py_IsInitialized() && PyGILState_Check())
      thread_ = PyEval_SaveThread();
  }
  ~WithoutPythonLock() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;
};

}  // namespace qkv

"""Names of tasks and cells, so that help need not import them."""

TASKS = ("copy", "adding", "match", "evidence", "mackey_glass", "digits", "text")
CELLS = ("gru", "lstm", "rnn", "leaky", "mingru", "lru", "alif", "minlstm", "adlif", "gif")

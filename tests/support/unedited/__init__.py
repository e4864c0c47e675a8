"""Training scripts that know nothing of gradtap. Each keeps the gradients that it sees itself, in OUT."""

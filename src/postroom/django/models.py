"""No models: the tables belong to the migrations. Django tells only apps that have this module of
a flush."""

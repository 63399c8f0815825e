{% include cookiecutter.__way ~ "/_toolkit.py" %}
